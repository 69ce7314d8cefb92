"""vLLM without the plugin, as installed here: the ground that the plugin's tests stand on."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from plugin.engines import engine, greedy
from tiny import prompt_of, same_up_to_ties, stock_greedy

pytestmark = pytest.mark.smoke

NEW = 48
# Below a block, a block, odd, several prefill steps of 512 tokens.
LENGTHS = (5, 32, 101, 1100)
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def prompts():
    return [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny_folder, prompts):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    return [stock_greedy(model, prompt, NEW) for prompt in prompts]


def assert_same(outputs, expected):
    for tokens, (reference, logits) in zip(outputs, expected, strict=True):
        assert same_up_to_ties(tokens, reference, logits), (tokens, reference)


def counters(llm):
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def test_greedy_tokens_are_those_of_transformers(tiny_folder, prompts, expected):
    with engine(tiny_folder) as llm:
        assert torch.distributed.is_initialized()
        assert_same(greedy(llm, prompts, NEW), expected)
    # A closed engine leaves no process group.
    assert not torch.distributed.is_initialized()


def test_ngram_drafts_change_no_token(tiny_folder, prompts, expected):
    with engine(tiny_folder, speculative_config=NGRAM, disable_log_stats=False) as llm:
        assert_same(greedy(llm, prompts, NEW), expected)
        counted = counters(llm)
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < counted["vllm:spec_decode_num_draft_tokens"]


def test_engines_of_other_settings_follow_one_another(tiny_folder, prompts, expected):
    with engine(tiny_folder, num_gpu_blocks_override=160, max_num_seqs=1) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 160
        assert_same(greedy(llm, prompts, NEW), expected)
    with engine(tiny_folder, block_size=64, enable_prefix_caching=False) as llm:
        cache = llm.llm_engine.vllm_config.cache_config
        assert (cache.num_gpu_blocks, cache.block_size) == (256, 64)
        assert_same(greedy(llm, prompts, NEW), expected)
