"""The built-in 32K model on real text: parity of the sparse path, and the demo's answer."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv import cli
from oasiskv.config import OasisConfig
from oasiskv.data import data_path
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.hf import Engine, load_model
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models import resolve_model
from oasiskv.stores.host import HostStore
from oasiskv.testing.refetch import ForcedRefetch
from tiny import same_up_to_ties, stock_greedy

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-32k"


def test_forced_refetch_gives_the_tokens_of_the_stock_model():
    folder = resolve_model(MODEL)
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    prompt = encode(load_tokenizer(folder), text, chat=False)[:333]
    loaded = load_model(folder)
    config = OasisConfig(budget_tokens=128, hot_tokens=512, threshold_tokens=0)
    engine = Engine(loaded, config, HostStore(loaded.geometry, 30), NgramDrafts())
    engine.before_step = ForcedRefetch(seed=3)
    tokens = engine.generate([prompt], 24)[0]
    assert engine.before_step.fetched_bytes > 0
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, logits = stock_greedy(stock, prompt, 24)
    assert same_up_to_ties(tokens, expected, logits)


def test_the_demo_answers_right_with_a_bounded_fast_tier(monkeypatch, capsys):
    options = ["--budget", "512", "--hot", "1024", "--max-new-tokens", "12", "--json"]
    document = str(data_path("demo/document.txt"))
    command = ["oasiskv", "generate", "--model", MODEL, "--prompt-file", document, *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"].startswith("730562")
    assert report["fast_tier_kv_bytes"] < report["dense_kv_bytes"] / 2.5
    assert 0 < max(report["fetched_bytes_per_step"]) <= report["cap_bytes_per_step"]
