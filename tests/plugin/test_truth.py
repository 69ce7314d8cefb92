"""With a hot set smaller than the context the plugin chooses what the reference engine chooses."""

import pytest

from oasiskv.data import data_path
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models import resolve_model
from plugin.probe import NGRAM
from plugin.truth import SMALL, assert_truth
from tiny import prompt_of


@pytest.mark.parametrize(
    ("lookahead", "speculative"),
    [("last_accepted", None), ("held_back", NGRAM), ("paper", NGRAM)],
)
def test_random_model(tiny_folder, lookahead, speculative):
    settings = SMALL | {"lookahead": lookahead}
    args = {"speculative_config": speculative, "max_model_len": 1024}
    prompts = [prompt_of(length) for length in (400, 413, 600)]
    _, compared, _ = assert_truth(tiny_folder, prompts, 48, settings, **args)
    assert compared > 1000


@pytest.mark.model
def test_real_model_and_text():
    """Four passages of 2,000 and more tokens of a novel, drafts accepted and held back."""
    folder = resolve_model("smollm2-135m")
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    ids = encode(load_tokenizer(folder), text, chat=False)
    prompts = [ids[3000 * i : 3000 * i + 2000 + 7 * i] for i in range(4)]
    settings = {
        "budget_tokens": 256,
        "hot_tokens": 384,
        "sink_tokens": 16,
        "window_tokens": 64,
        "host_gib": 0.5,
        "lookahead": "held_back",
    }
    args = {
        "speculative_config": NGRAM,
        "max_model_len": 2304,
        "num_gpu_blocks_override": 800,
    }
    tokens, compared, accepted = assert_truth(folder, prompts, 64, settings, **args)
    assert [len(output) for output in tokens] == [64] * 4
    assert len(set(map(tuple, tokens))) == 4
    assert accepted > 0
    # 30 layers, 3 KV heads, 16 wanted blocks.
    assert compared > 4 * 30 * 30 * 3 * 16
