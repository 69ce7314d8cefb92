"""Ends of all kinds: whatever happens to requests, every block comes back and output is right."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError

from oasiskv.errors import StateError
from oasiskv.vllm.runtime import current_runtime
from plugin.driver import Driver
from plugin.probe import NGRAM, probed
from tiny import prompt_of


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


class TestEnds:
    """Aborts, and a mix of everything, in one engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def probe(cls, tiny_folder, model):
        """Room for three sparse requests, or for eight dense ones that may yet go sparse."""
        with probed(
            tiny_folder,
            speculative_config=NGRAM,
            num_gpu_blocks_override=150,
            max_num_batched_tokens=64,
            settings={"lookahead": "held_back", "threshold_tokens": 100},
        ) as probe:
            yield probe

    @pytest.mark.smoke
    @pytest.mark.parametrize("times", [1, 2])
    @pytest.mark.parametrize(
        ("when", "steps"),
        [("waiting", 0), ("prefill", 2), ("transition", 4), ("decode", 9)],
    )
    def test_v49118_abort(self, probe, model, when, steps, times):
        driver = Driver(probe)
        # Of its own, so that vLLM's prefix cache does not shorten the prefill.
        prompt = prompt_of(200, seed=10 * steps + times)
        driver.add("aborted", prompt, 100)
        driver.step(steps)
        driver.add("other", prompt_of(50), 12)
        request = driver.requests["aborted"]
        known = probe.runtime.target.requests.get(request.request_id)
        blocks = probe.manager.req_to_blocks.get(request.request_id, [])
        nulls = sum(block.is_null for block in blocks)
        state = probe.state.requests[request.request_id]
        assert (known is not None) == (when != "waiting")
        if known is not None:
            start = probe.runtime.target.window_start(request.request_id)
            assert (start is not None) == (when in ("transition", "decode"))
            assert (state.window_start > 0) == (when in ("transition", "decode"))
            assert (nulls > 0) == (when == "decode")
        for _ in range(times):
            driver.abort("aborted")
        driver.finish()
        driver.abort("aborted")
        assert set(driver.done) == {"other"}
        driver.assert_right_and_all_back(model)

    def test_three_hundred_requests_of_all_kinds(self, probe, model):
        probe.forced = False
        draw = random.Random(0)
        driver, waiting, aborted = Driver(probe), list(range(300)), set()
        while waiting or driver.engine.has_unfinished_requests():
            for _ in range(min(len(waiting), draw.choice([0, 1, 5]))):
                index = waiting.pop()
                length = draw.choice([draw.randint(80, 105), 1 + int(399 * draw.random() ** 3)])
                driver.add(str(index), prompt_of(length, seed=index), draw.randint(1, 12))
            if draw.random() < 0.2 and driver.requests:
                name = draw.choice(list(driver.requests))
                driver.abort(name)
                if name not in driver.done:
                    aborted.add(name)
            driver.step()
        probe.forced = True
        assert len(aborted) > 20
        assert driver.done.keys() | aborted == set(map(str, range(300)))
        assert sum(driver.preemptions()) > 0
        driver.assert_right_and_all_back(model)


class TestCrowdedPool:
    """More than the pool holds at once, in one engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def crowded(cls, tiny_folder, model):
        """Dense requests fill the pool; all pass the threshold within a few steps."""
        with probed(
            tiny_folder,
            num_gpu_blocks_override=8 * 7 + 12 + 1,
            max_model_len=256,
            enable_prefix_caching=False,
            settings={"threshold_tokens": 116, "hot_tokens": 160},
        ) as probe:
            yield probe

    def test_a_pool_full_of_dense_requests_makes_its_transitions(self, crowded, model):
        driver = Driver(crowded)
        for index in range(8):
            driver.add(str(index), prompt_of(100 + index, seed=index), 50)
        driver.step(2)
        assert len(crowded.runtime.target.requests) == 8
        driver.finish(most=800)
        assert len(driver.done) == 8
        assert len(crowded.sparse) == 8
        # Sparse, each needs 13 blocks of 68, and the others keep S free: none has to go twice.
        assert sum(driver.preemptions()) > 0
        assert max(driver.preemptions()) <= 1
        driver.assert_right_and_all_back(model)

    @pytest.mark.smoke
    def test_preempted_sparse_requests_come_back_sparse_and_give_the_same_tokens(
        self, crowded, model
    ):
        """Four sparse ones fill the pool; dense ones before them, which stay dense, grow."""
        crowded.restarted.clear()
        driver = Driver(crowded)
        for index in range(3):
            driver.add(f"dense {index}", prompt_of(40, seed=index), 76)
        for index in range(4):
            driver.add(str(index), prompt_of(117, seed=index), 60)
            driver.step(2)
        driver.finish(most=800)
        assert not crowded.restarted
        preempted = {r.request_id for r in driver.requests.values() if r.num_preemptions}
        assert preempted <= crowded.sparse
        assert 1 <= sum(driver.preemptions()) <= 2
        assert len(driver.done) == 7
        driver.assert_right_and_all_back(model)

    def test_a_dense_request_that_may_go_sparse_does_not_have_others_preempted(
        self, crowded, model
    ):
        """Sparse ones are taken in only while they leave it its reserve."""
        driver = Driver(crowded)
        driver.add("dense", prompt_of(60), 60)
        for index in range(4):
            driver.add(str(index), prompt_of(117, seed=index), 60)
            driver.step(2)
        driver.finish(most=800)
        assert driver.preemptions() == [0] * 5
        assert len(driver.done) == 5
        driver.assert_right_and_all_back(model)


def test_requests_wait_for_room_in_the_store(tiny_folder, model):
    """As many store blocks as the longest request may fill, even with max_tokens beyond that."""
    with probed(tiny_folder, max_model_len=336, settings={"host_gib": 0.00035}) as probe:
        assert probe.state.store.capacity_blocks == 22
        driver = Driver(probe)
        driver.add("before", prompt_of(150), 20)
        driver.step()
        driver.add("long", prompt_of(310), 300)
        with pytest.raises(VLLMValidationError, match="336"):
            driver.add("too long for the store, as for the engine", prompt_of(400), 10)
        driver.add("after", prompt_of(100), 10)
        driver.step(2)
        assert len(probe.runtime.target.requests) == 1
        driver.finish()
        assert len(probe.sparse) == 3
        assert len(driver.done.pop("long")) == 336 - 310
        driver.assert_right_and_all_back(model)


def test_an_engine_that_was_shut_down_leaves_no_store(tiny_folder):
    with probed(tiny_folder) as probe:
        stores = [model.store for model in probe.runtime.models]
        assert all(store.nbytes > 0 for store in stores)
        assert current_runtime() is probe.runtime
    assert [store.nbytes for store in stores] == [0]
    with pytest.raises(StateError, match="not been set up"):
        current_runtime()
