"""Faults that users of such systems reported, each tried here under the name of its report.

v: vllm-project/vllm, a: vllm-project/vllm-ascend, s: sgl-project/sglang, l: LMCache/LMCache. Others
are in the tests of their part: v31210 in test_parity, v49118 in test_lifecycle, l1330 and v39734
(refused at start) in test_checks, v43226, v56089, v52360, v46014 and a16662 also in test_late,
v47282 in test_chaos, v51579 in test_killed, shapes and drafts in test_reported_shapes, fi363 and
v50427 in tests/ops, v51080 in tests/stores/test_pinned.py, v45704 and v56158 in tests/gpu.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError

from oasiskv.vllm import runtime
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of


@pytest.fixture(scope="module", params=["one by one", "at once"])
def tiered(request):
    """On the CPU in both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
        yield


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def assert_greedy(probe, model, prompts, new):
    for prompt, tokens in zip(prompts, greedy(probe.llm, prompts, new), strict=True):
        assert len(tokens) == new
        assert is_greedy(model, prompt, tokens), len(prompt)
    probe.assert_all_back()


class TestInOneEngine:
    """HBM holds a few prompts, the store many."""

    @pytest.fixture(scope="class")
    @classmethod
    def probe(cls, tiny_folder, tiered):
        """With drafts, since most of these were seen without and with."""
        with probed(
            tiny_folder, num_gpu_blocks_override=300, speculative_config=NGRAM, max_model_len=512
        ) as probe:
            yield probe

    @pytest.mark.parametrize("residue", range(16))
    def test_l2206_hits_in_hbm_and_in_the_store_in_one_prompt(self, probe, model, residue):
        prompt = prompt_of(160 + residue, seed=residue)
        assert_greedy(probe, model, [prompt], 4)
        assert probe.llm.reset_prefix_cache()
        assert_greedy(probe, model, [prompt[: 64 + residue]], 1)
        assert_greedy(probe, model, [prompt], 4)

    @pytest.mark.parametrize("evicted", [False, True])
    def test_v51094_a_prompt_of_whole_blocks_twice(self, probe, model, evicted):
        prompt = prompt_of(256, seed=100 + evicted)
        assert_greedy(probe, model, [prompt], 4)
        if evicted:
            assert probe.llm.reset_prefix_cache()
        assert_greedy(probe, model, [prompt, prompt], 4)

    @pytest.mark.parametrize("evicted", [False, True])
    @pytest.mark.parametrize("length", [128, 135])
    def test_l3322_the_whole_prompt_is_found_and_one_token_is_asked_for(
        self, probe, model, length, evicted
    ):
        prompt = prompt_of(length, seed=200 + evicted)
        assert_greedy(probe, model, [prompt], 1)
        if evicted:
            assert probe.llm.reset_prefix_cache()
        assert_greedy(probe, model, [prompt], 1)

    def test_l2238_a_prompt_shorter_than_a_block_twice(self, probe, model):
        for _ in range(2):
            assert_greedy(probe, model, [prompt_of(7)], 3)
            assert probe.llm.reset_prefix_cache()

    @pytest.mark.parametrize("aborted", ["first", "second"])
    def test_l3381_two_share_a_prefix_and_one_is_aborted(self, probe, model, aborted):
        prefix = prompt_of(160, seed=300)
        greedy(probe.llm, [prefix], 2)
        assert probe.llm.reset_prefix_cache()
        driver = Driver(probe)
        driver.add("first", prefix + prompt_of(20, seed=1), 12)
        driver.add("second", prefix + prompt_of(25, seed=2), 12)
        driver.step(3)
        first, second = (driver.requests[name].request_id for name in ("first", "second"))
        known = probe.state.requests
        assert known[first].store_blocks[:10] == known[second].store_blocks[:10]
        driver.abort(aborted)
        driver.finish()
        assert len(driver.done) == 1
        driver.assert_right_and_all_back(model)

    def test_a16662_cancelling_while_blocks_are_loaded_leaks_nothing(self, probe, model):
        prompt = prompt_of(300, seed=400)
        greedy(probe.llm, [prompt], 2)
        free = probe.state.store.free_blocks
        for round_ in range(20):
            assert probe.llm.reset_prefix_cache()
            driver = Driver(probe)
            driver.add(str(round_), prompt, 20)
            driver.step(round_ % 3)
            driver.abort(str(round_))
            driver.finish()
        assert probe.state.store.free_blocks == free
        assert_greedy(probe, model, [prompt], 4)

    def test_v42381_one_token_over_the_models_length(self, probe, model):
        longest = 512
        [tokens] = greedy(probe.llm, [prompt_of(longest - 1, seed=500)], 1)
        assert len(tokens) == 1
        for length in (longest, longest + 1):
            with pytest.raises(VLLMValidationError, match=str(longest)):
                greedy(probe.llm, [prompt_of(length, seed=500)], 1)
        assert_greedy(probe, model, [prompt_of(100, seed=501)], 4)


def test_v26329_a_store_of_four_blocks_and_three_requests_of_three(tiny_folder, model, tiered):
    # Four blocks of 16 KiB.
    settings = {"host_gib": 4 * 2**14 / 2**30, "hot_tokens": 64, "budget_tokens": 16}
    with probed(tiny_folder, max_model_len=79, settings=settings) as probe:
        assert probe.state.store.capacity_blocks == 4
        prompts = [prompt_of(48, seed=index) for index in range(3)]
        assert_greedy(probe, model, prompts, 10)
        assert_greedy(probe, model, prompts[::-1], 10)


def test_s23704_decoded_tokens_are_part_of_admission(tiny_folder, model, tiered):
    """The pool holds the prompts and eight tokens more."""
    prompts = [prompt_of(120, seed=index) for index in range(2)]
    with probed(
        tiny_folder, num_gpu_blocks_override=1 + 16 + 12 + 4, max_model_len=184,
        settings={"hot_tokens": 192, "threshold_tokens": 200},
    ) as probe:  # fmt: skip
        assert_greedy(probe, model, prompts, 64)


# With the token before them they are a block, and one more.
@pytest.mark.parametrize("drafts", [15, 16])
def test_s12349_many_draft_tokens(tiny_folder, model, tiered, drafts):
    speculative = NGRAM | {"num_speculative_tokens": drafts}
    with probed(tiny_folder, speculative_config=speculative) as probe:
        # A text that repeats, so that drafts are found.
        assert_greedy(probe, model, [prompt_of(40) * 4, prompt_of(97)], 40)


def test_v52360_v46014_a_preempted_request_comes_back_while_its_blocks_are_in_use(
    tiny_folder, model, tiered
):
    """All share a prefix; the pool holds some of them, and they push one another out."""
    prefix = prompt_of(96)
    with probed(
        tiny_folder,
        num_gpu_blocks_override=60,
        max_model_len=256,
        settings={"threshold_tokens": 116, "hot_tokens": 160},
    ) as probe:
        driver = Driver(probe)
        for index in range(6):
            driver.add(str(index), prefix + prompt_of(5 + index, seed=index), 60)
            driver.step(2)
        driver.finish(most=1500)
        assert sum(driver.preemptions()) > 0
        assert len(driver.done) == 6
        driver.assert_right_and_all_back(model)


def test_s21125_acceptance_is_the_same_after_the_drafts_kv_came_from_the_store(tiny_folder):
    """The target drafts for itself, so that every draft is right unless a tile is wrong."""
    speculative = {
        "method": "draft_model",
        "model": str(tiny_folder),
        "num_speculative_tokens": 3,
    }
    settings = {"lookahead": "last_accepted"}
    with probed(tiny_folder, speculative_config=speculative, settings=settings) as probe:
        prompt, seen = prompt_of(200), []
        probe.runtime.observer = seen.append
        for _ in range(2):
            seen.clear()
            greedy(probe.llm, [prompt], 20)
            drafted = [record for record in seen if record.drafts]
            assert len(drafted) >= 5
            assert all(len(r.accepted) == 1 + len(r.drafts) for r in drafted)
            assert probe.llm.reset_prefix_cache()
