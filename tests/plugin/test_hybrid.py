"""Models that have layers with a sliding window beside those with full attention.

Only the latter go sparse. Both have blocks of one pool, each by a table of its own.
"""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

import oasiskv.vllm
from oasiskv.errors import ConfigError, TransferError
from oasiskv.vllm import runtime
from oasiskv.vllm.layers import SparseLayers
from plugin.driver import Driver
from plugin.engines import DEFAULTS, engine, greedy, make_llm
from plugin.hybrid import FILL, FULL, GEMMA
from plugin.probe import EXACT, is_greedy, probed
from tiny import prompt_of
from tiny_folder import save_tiny

PROMPT, NEW = 180, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("hybrid") / "tiny", **GEMMA)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class TestOneEngine:
    """Tests that share an engine."""

    @pytest.fixture(scope="class", params=["one by one", "at once"])
    @classmethod
    def probe(cls, request, folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
            args = {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 96}
            with probed(folder, **args) as probe:
                probe.fill = FILL
                yield probe

    def test_only_layers_with_full_attention_go_sparse(self, probe):
        full = [index for index, kind in enumerate(GEMMA["layer_types"]) if kind == FULL]
        names = [f"model.layers.{index}.self_attn.attn" for index in full]
        assert list(probe.runtime.target.index) == names

    def test_a_preempted_one_starts_again(self, probe, model):
        driver = Driver(probe)
        prompt = prompt_of(PROMPT)
        driver.add("one", prompt, NEW)
        request = driver.requests["one"]
        driver.until(lambda: request.request_id in probe.sparse)
        driver.step(4)
        state = probe.state.requests[request.request_id]
        assert state.window_start
        driver.preempt("one")
        assert not state.store_blocks
        assert not state.resume_start
        driver.finish()
        assert request.request_id in probe.restarted
        driver.assert_right_and_all_back(model)

    def test_a_prefix_is_found_in_hbm_and_not_in_the_store(self, probe, model):
        driver = Driver(probe)
        prompt = prompt_of(PROMPT, seed=1)
        for name, found in (("first", 0), ("in HBM", 160), ("gone", 0)):
            if name == "gone":
                assert probe.llm.reset_prefix_cache()
            driver.add(name, prompt, NEW)
            driver.finish()
            assert (driver.found[name] > 0) == (found > 0)
            assert driver.found[name] >= found
        driver.assert_right_and_all_back(model)

    def test_many_at_once_some_of_them_preempted(self, probe, model):
        driver = Driver(probe)
        for index in range(6):
            driver.add(str(index), prompt_of(100 + 17 * index, seed=2), NEW)
        driver.step(6)
        driver.preempt("1")
        driver.step(2)
        driver.preempt("3")
        driver.finish()
        assert sum(driver.preemptions()) == 2
        assert len(probe.sparse & {r.request_id for r in driver.requests.values()}) == 6
        driver.assert_right_and_all_back(model)

    def test_a_lost_tile_ends_the_engine_in_words(self, probe):
        if not isinstance(probe.runtime.target, SparseLayers):
            pytest.skip("what is tiered at once is never late")
        driver = Driver(probe)
        driver.add("one", prompt_of(100), NEW)
        driver.step(3)
        [request] = probe.runtime.target.requests.values()
        request.failed = True
        with pytest.raises(TransferError, match="several KV-cache groups"):
            probe.runtime.failed_blocks()
        request.failed = False
        driver.finish()


def test_the_least_pool_serves_requests_of_max_model_len(folder):
    """It has room for the sliding windows too."""
    args = DEFAULTS | oasiskv.vllm.engine_args(**(EXACT | {"hot_tokens": 128}))
    args |= {"max_model_len": 256, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
    try:
        with pytest.raises(ConfigError) as caught:
            make_llm(folder, **args)
    finally:
        cleanup_dist_env_and_memory()
    least = int(re.search(r"num_gpu_blocks_override: (\d+)", str(caught.value))[1])
    # vLLM's own, 16 dense, 8 slots, two groups of windows of 39 + 64 tokens and a block more.
    assert least == 1 + 16 + 8 + 2 * 8
    with engine(folder, **(args | {"num_gpu_blocks_override": least})) as llm:
        outputs = greedy(llm, [prompt_of(200), prompt_of(40), prompt_of(250)], 6)
        assert [len(tokens) for tokens in outputs] == [6, 6, 6]


def test_under_pressure(folder, model):
    settings = {"mode": "under_pressure", "hot_tokens": 96}
    args = {"num_gpu_blocks_override": 130, "max_model_len": 384, "max_num_batched_tokens": 64}
    with probed(folder, settings=settings, **args) as probe:
        probe.fill = FILL
        driver = Driver(probe)
        for index in range(6):
            driver.add(str(index), prompt_of(200 + index), 60)
        driver.finish()
        sparse = {n for n, r in driver.requests.items() if r.request_id in probe.sparse}
        assert 0 < len(sparse) < 6
        for name in driver.done.keys() - sparse:
            assert is_greedy(model, driver.prompts[name], driver.done[name]), name
        assert len(driver.done) == 6
        greedy(probe.llm, [[1]], 1)
        probe.assert_all_back()


def test_one_pool_is_needed(folder):
    args = DEFAULTS | oasiskv.vllm.engine_args(**EXACT)
    args |= {"disable_hybrid_kv_cache_manager": True}
    try:
        with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager=True") as caught:
            make_llm(folder, **args)
    finally:
        cleanup_dist_env_and_memory()
    assert "leave it out" in str(caught.value)
