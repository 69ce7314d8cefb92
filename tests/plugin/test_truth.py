"""With a hot set smaller than the context the plugin chooses what the reference engine chooses."""

import pytest

from plugin.probe import NGRAM
from plugin.truth import NOVEL, SMALL, assert_truth, novel_prompts
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
    folder, prompts = novel_prompts()
    args = {
        "speculative_config": NGRAM,
        "max_model_len": 2304,
        "num_gpu_blocks_override": 800,
    }
    tokens, compared, accepted = assert_truth(folder, prompts, 64, NOVEL, **args)
    assert [len(output) for output in tokens] == [64] * 4
    assert len(set(map(tuple, tokens))) == 4
    assert accepted > 0
    # 30 layers, 3 KV heads, 16 wanted blocks.
    assert compared > 4 * 30 * 30 * 3 * 16
