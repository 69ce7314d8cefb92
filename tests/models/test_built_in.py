"""The built-in 32K model, end to end: fetched, merged, and dense attention finds the facts."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oasiskv.data import data_path
from oasiskv.models import resolve_model

pytestmark = pytest.mark.model
FACT = re.compile(r"The special number of (\w+ \w+) is (\d{6})\.")


def test_the_folder_says_32k_and_bf16():
    folder = resolve_model("smollm2-135m-32k")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 32_768
    assert config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 32_768
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


@torch.no_grad()
def test_dense_greedy_decoding_finds_each_fact_of_the_demo():
    folder = resolve_model("smollm2-135m-32k")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    body, question = data_path("demo/document.txt").read_text().split("Question:")
    facts = FACT.findall(body)
    asked = re.search(r"number of (\w+ \w+)\?", question).group(1)
    assert asked == facts[1][0]

    # One forward for the three questions: each answer stands after its own question only, and the
    # greedy choice at every digit is compared with it.
    tokens, answers = tokenizer(body)["input_ids"], []
    for key, value in facts:
        tokens += tokenizer("Question:" + question.replace(asked, key))["input_ids"]
        digits = tokenizer(value)["input_ids"]
        answers.append((len(tokens), digits))
        tokens += digits + tokenizer("\n\n")["input_ids"]
    kept = len(tokens) - answers[0][0] + 1
    logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=kept).logits[0]
    greedy = logits.argmax(-1).tolist()
    for start, digits in answers:
        first = start - 1 - (len(tokens) - kept)
        assert greedy[first : first + len(digits)] == digits
