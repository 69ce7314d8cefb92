"""``oasiskv bench decode`` on the CPU, where its times are of no use: that it runs."""

import json
import sys

import pytest

from oasiskv import cli
from oasiskv.bench import decode
from oasiskv.bench.in_process import novel_prompts
from oasiskv.data import data_path
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.vllm import runtime
from tiny_folder import save_tiny

SIZES = ["--requests", "3", "--prompt-tokens", "400", "--steps", "12", "--host-gib", "0.05"]
SPARSE = ["--budget", "64", "--hot", "96"]
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(autouse=True)
def batched(monkeypatch):
    """Requests are tiered at once, as on a GPU."""
    monkeypatch.setattr(runtime, "BATCHED_ON", {"cpu"})


def output_of(monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", ["oasiskv", "bench", "decode", *SIZES, *SPARSE, *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capfd.readouterr().out
    assert not stopped.value.code
    return out


def test_prompts_are_text_from_different_places(tiny_folder):
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    novel = encode(load_tokenizer(tiny_folder), text, chat=False)
    prompts = novel_prompts(tiny_folder, 3, 30_000)
    third = len(novel) // 3
    assert len(novel) < 60_000
    assert prompts[0] == novel[:30_000]
    assert prompts[1] == novel[third : third + 30_000]
    # Over the end of the novel to its start.
    second = 2 * len(novel) // 3
    assert prompts[2] == (novel + novel)[second : second + 30_000]


@pytest.mark.parametrize("drafts", [0, 2])
def test_text_on_a_model_with_weights(monkeypatch, capfd, tmp_path, drafts):
    folder = save_tiny(tmp_path / "model", head_dim=32)
    out = output_of(
        monkeypatch, capfd, "--model", str(folder), "--draft-tokens", str(drafts), "--json"
    )
    result = json.loads(out)
    stock, oasis = result["stock"], result["oasis"]
    for report in (stock, oasis):
        assert report["prefill_tokens_per_s"] > 0
        assert report["low_ms"] <= report["step_ms"] <= report["high_ms"]
        if drafts:
            assert report["tokens_per_step"] >= 3
        else:
            assert report["tokens_per_step"] == 3
        expected = 1000 * report["tokens_per_step"] / report["step_ms"]
        assert report["tokens_per_s"] == pytest.approx(expected)
        assert report["parts"]["steps"] == 8
    assert stock["fetched_bytes_per_step"] == 0 < oasis["fetched_bytes_per_step"]
    # Sink, slots, window, the block being filled and one for drafts, against 400 tokens and more.
    assert oasis["block_tokens"] == 16
    most = 1 + 6 + 4 + 1 + bool(drafts)
    assert 3 * (1 + 6 + 4) <= oasis["pool_blocks"] <= 3 * most
    assert stock["pool_blocks"] * stock["block_tokens"] > 3 * 400


def test_random_tokens_on_a_shape(monkeypatch, capfd):
    monkeypatch.setitem(decode.SHAPES, "tiny", TINY)
    lines = output_of(monkeypatch, capfd, "--model", "tiny").splitlines()
    for row in ("prefill alone, tokens/s", "device idle, ms", "matrix products, ms"):
        assert any(row in line for line in lines)
