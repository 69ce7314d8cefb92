"""The sparse path with a hot set as large as the context: output as without the plugin.

Before each step half of the hot set is overwritten with NaN and fetched again from the store, and
every block that vLLM has free is NaN too.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from oasiskv.data import data_path
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models import resolve_model
from plugin.engines import engine, greedy
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of, same_up_to_ties, stock_greedy

NEW = 10
RESIDUES = [prompt_of(length) for length in range(96, 112)]
"""Every number of tokens in the open block."""
OTHERS = [prompt_of(length) for length in (7, 16, 128, 250)]
HALF = prompt_of(160)
SHARED = [HALF + prompt_of(n, seed=1) for n in (1, 15, 16, 40)]
"""The first ten blocks are common to all."""
PROMPTS = RESIDUES + OTHERS + [HALF] + SHARED
TINY_STEPS = {"max_num_batched_tokens": 72, "max_num_seqs": 8}
"""Prompts take several steps, which do not end with a block."""

ENGINES = {
    "no drafts": {},
    "last_accepted": {"speculative_config": NGRAM, "settings": {"lookahead": "last_accepted"}},
    "held_back, small steps": {
        "speculative_config": NGRAM,
        "settings": {"lookahead": "held_back"},
        **TINY_STEPS,
    },
    "held_back, in mid-decode": {
        "speculative_config": NGRAM,
        "settings": {"lookahead": "held_back", "threshold_tokens": 108},
    },
    "paper": {"speculative_config": NGRAM, "settings": {"lookahead": "paper"}},
}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(tiny_folder, model):
    """Greedy tokens and logits by prompt, on which transformers and stock vLLM agree."""
    reference = {tuple(p): stock_greedy(model, p, NEW) for p in PROMPTS}
    with engine(tiny_folder, enable_prefix_caching=False) as llm:
        for prompt, tokens in zip(PROMPTS, greedy(llm, PROMPTS, NEW), strict=True):
            assert same_up_to_ties(tokens, *reference[tuple(prompt)])
    return reference


def assert_right(probe, expected, prompts, new=NEW):
    """Generate; compare; everything really went through the store and HBM was given back."""
    probe.given_back.clear()
    probe.sparse.clear()
    fetched = probe.refetch.fetched_bytes
    outputs = greedy(probe.llm, prompts, new)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        reference, logits = expected[tuple(prompt)]
        assert same_up_to_ties(tokens, reference[:new], logits[:new]), len(prompt)
    config = probe.runtime.config
    lengths = [len(prompt) + new for prompt in prompts]
    past = sum(n - 5 > config.resolved_threshold_tokens for n in lengths)
    assert past <= len(probe.sparse) <= len(prompts)
    # All but sink and window, as of the last step, which may have gained up to four tokens.
    kept = config.sink_blocks + config.window_blocks
    least = sorted(max(0, (n - 5) // 16 - kept) for n in lengths)
    if config.resolved_threshold_tokens:
        least = [blocks if n > 120 else 0 for blocks, n in zip(least, sorted(lengths), strict=True)]
    nulls = sorted(probe.given_back.values())
    assert len(nulls) == len(prompts)
    assert all(have >= want for have, want in zip(nulls, least, strict=True)), (nulls, least)
    assert (
        probe.refetch.fetched_bytes - fetched
        > sum(least) * probe.runtime.target.geometry.block_bytes
    )
    probe.assert_all_back()
    return outputs


class TestEachEngine:
    """Tests that share an engine, one after another of ``ENGINES``."""

    @pytest.fixture(scope="class", params=ENGINES.values(), ids=ENGINES.keys())
    @classmethod
    def probe(cls, request, tiny_folder, expected):
        """One engine after another; ``expected`` has closed its own before."""
        args = {"max_num_seqs": 64, "num_gpu_blocks_override": 3000, "enable_prefix_caching": False}
        with probed(tiny_folder, **(args | request.param)) as probe:
            yield probe

    @pytest.mark.smoke
    def test_every_number_of_tokens_in_the_open_block(self, probe, expected):
        assert_right(probe, expected, RESIDUES)

    def test_short_prompts_and_whole_blocks(self, probe, expected):
        assert_right(probe, expected, OTHERS)

    @pytest.mark.smoke
    def test_drafts_are_fed_and_accepted_as_the_mode_says(self, probe, model):
        if probe.llm.llm_engine.vllm_config.speculative_config is None:
            pytest.skip("this engine has no drafts")
        seen = []
        probe.runtime.observer = lambda record: seen.append(
            (len(record.drafts), len(record.accepted))
        )
        outputs = greedy(probe.llm, RESIDUES[:4], 40)
        probe.runtime.observer = None
        for prompt, tokens in zip(RESIDUES, outputs, strict=False):
            assert is_greedy(model, prompt, tokens)
        assert max(drafts for drafts, _ in seen) == 3
        most = {"last_accepted": 4, "held_back": 3, "paper": 1}[probe.runtime.config.lookahead]
        assert 1 <= max(accepted for _, accepted in seen) <= most
        if most > 1:
            assert sum(accepted for _, accepted in seen) > len(seen)

    def test_v31210_64_equal_requests_at_once(self, probe, expected):
        outputs = assert_right(probe, expected, [RESIDUES[11]] * 64, new=6)
        assert all(tokens == outputs[0] for tokens in outputs)

    @pytest.mark.smoke
    def test_log_probabilities_are_those_of_transformers(self, probe, expected):
        prompts = [RESIDUES[3], RESIDUES[12], OTHERS[0], OTHERS[3]]
        sampling = SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=5
        )
        outputs = probe.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens, logits = expected[tuple(prompt)]
            assert list(output.outputs[0].token_ids) == tokens
            for row, found in zip(logits.log_softmax(-1), output.outputs[0].logprobs, strict=True):
                assert len(found) >= 5
                for token, entry in found.items():
                    assert math.isclose(entry.logprob, row[token], rel_tol=0, abs_tol=1e-4)


@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["no drafts", "drafts"])
def test_a_shared_prefix_is_computed_once(tiny_folder, expected, speculative_config):
    with probed(
        tiny_folder,
        enable_prefix_caching=True,
        speculative_config=speculative_config,
        settings={"lookahead": "held_back"},
    ) as probe:
        assert_right(probe, expected, [HALF])
        prompts = [{"prompt_token_ids": p} for p in SHARED]
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        cached = [output.num_cached_tokens for output in probe.llm.generate(prompts, sampling)]
        assert min(cached) >= len(HALF) - 16
        assert_right(probe, expected, SHARED)


@pytest.mark.model
def test_real_weights_at_every_number_of_tokens_in_the_open_block():
    """A novel's text past the threshold, half the hot set refetched before each step."""
    folder = resolve_model("smollm2-135m")
    text = data_path("texts/persuasion.txt").read_text(encoding="utf-8")
    ids = encode(load_tokenizer(folder), text, chat=False)
    prompts = [ids[500 * i : 500 * i + 96 + i] for i in range(16)]
    args = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
    with engine(folder, num_gpu_blocks_override=300, **args) as llm:
        stock = greedy(llm, prompts, NEW)
    settings = {"hot_tokens": 256, "host_gib": 0.25, "lookahead": "held_back"}
    args |= {"num_gpu_blocks_override": 700, "speculative_config": NGRAM}
    with probed(folder, settings=settings, **args) as probe:
        assert greedy(probe.llm, prompts, NEW) == stock
        assert len(probe.sparse) == 16
        assert probe.refetch.fetched_bytes > 0
        probe.assert_all_back()
