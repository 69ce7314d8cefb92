"""A request that was preempted while sparse comes back sparse, from the store."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.vllm import runtime
from oasiskv.vllm.layers import StepTokens
from oasiskv.vllm.plan import OPEN_BLOCKS
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import NGRAM, probed
from tiny import prompt_of

PROMPT, NEW = 120, 20


@pytest.fixture(scope="module", params=["one by one", "at once"], autouse=True)
def tiered(request):
    """On the CPU in both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
        yield request.param


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


class Counting(Driver):
    """A driver that counts.

    Attributes:
        computed: vLLM's request id -> tokens computed, drafts apart.
        held: vLLM's request id -> blocks of its table and slots, as of the last forward.
        forwards: vLLM's request id -> of each forward since its last preemption, if it was sparse.
    """

    def __init__(self, probe):
        super().__init__(probe)
        self.computed, self.held, self.forwards = {}, {}, {}
        if not hasattr(probe.runtime, "whole_begin_step"):
            probe.runtime.whole_begin_step = probe.runtime.begin_step
        probe.runtime.begin_step = self._begin_step

    def _begin_step(self, scheduled):
        self.probe.runtime.whole_begin_step(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        target = self.probe.runtime.target
        for name, count in scheduled.num_scheduled_tokens.items():
            if name not in target.requests:
                continue
            fed = count - len(drafts.get(name, ()))
            self.computed[name] = self.computed.get(name, 0) + fed
            table = self.probe.manager.req_to_blocks[name]
            slots = len(self.probe.state.requests[name].hot)
            self.held[name] = slots + sum(not block.is_null for block in table)
            sparse = target.window_start(name) is not None
            self.forwards.setdefault(name, []).append(sparse)

    def preempt(self, name):
        super().preempt(name)
        self.forwards.pop(self.requests[name].request_id, None)

    def was_sparse(self, name):
        """Whether its last forward was, if there was one since it was preempted."""
        return any(self.forwards.get(self.requests[name].request_id, [])[-1:])


def assert_kept_nothing(probe):
    assert not any(part.kept for part in probe.runtime.models)


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["no drafts", "drafts"])
def test_at_every_phase_it_gives_the_tokens_of_an_undisturbed_one(tiny_folder, model, drafts):
    settings = {"lookahead": "held_back", "threshold_tokens": PROMPT}
    with probed(
        tiny_folder,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        speculative_config=drafts,
        settings=settings,
    ) as probe:
        prompt = prompt_of(PROMPT)
        [expected] = greedy(probe.llm, [prompt], NEW)
        steps, sparse_ones = 1, 0
        while True:
            driver = Counting(probe)
            driver.add("one", prompt, NEW)
            driver.step(steps)
            if "one" in driver.done:
                break
            request = driver.requests["one"]
            before = request.num_computed_tokens
            sparse = probe.state.requests[request.request_id].window_start > 0
            driver.preempt("one")
            computed = driver.computed.copy()
            driver.step()
            assert driver.was_sparse("one") == sparse
            if sparse:
                sparse_ones += 1
                again = driver.computed[request.request_id] - computed[request.request_id]
                assert again <= 17
                assert before + 1 - again < before + 1
                # Sink, S slots, a window of one, and those that are open.
                assert driver.held[request.request_id] <= 1 + 28 + 1 + OPEN_BLOCKS
            driver.finish()
            assert driver.done == {"one": expected}
            steps += 1
        assert sparse_ones > (NEW // 4 if drafts else NEW - 3)
        driver.finish()
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)
        assert probe.refetch.fetched_bytes > 0


SMALL_POOL = {
    "num_gpu_blocks_override": 1 + 16 + 10,
    "max_model_len": 256,
    "settings": {"threshold_tokens": 116, "hot_tokens": 160},
}
"""Room for one request of the longest and its slots; a sparse one has 14 blocks of 26."""


class TestSmallPool:
    """In one engine, whose settings are exact up to 192 tokens."""

    @pytest.fixture(scope="class", params=[True, False], ids=["caching", "no caching"])
    @classmethod
    def probe(cls, request, tiny_folder, tiered):
        with probed(tiny_folder, enable_prefix_caching=request.param, **SMALL_POOL) as probe:
            yield probe

    def test_it_is_let_in_where_a_dense_one_would_wait(self, probe, model, monkeypatch):
        driver = Counting(probe)
        driver.add("short", prompt_of(80), 36)
        driver.add("sparse", prompt_of(120, seed=1), 60)
        driver.step(30)
        before = driver.held[driver.requests["sparse"].request_id]
        driver.preempt("sparse")
        tokens, free = driver.requests["sparse"].num_tokens, probe.pool.get_num_free_blocks()
        assert free < -(-tokens // 16) + 10
        needed, asked = probe.manager.get_num_blocks_to_allocate, []

        def ask(request_id, *args, **settings):
            asked.append((request_id, needed(request_id, *args, **settings)))
            return asked[-1][1]

        monkeypatch.setattr(probe.manager, "get_num_blocks_to_allocate", ask)
        driver.step()
        assert driver.was_sparse("sparse")
        # As many as it got, whether some were found in vLLM's prefix cache or not.
        taken = free - probe.pool.get_num_free_blocks()
        assert asked[-1] == (driver.requests["sparse"].request_id, taken)
        assert driver.held[driver.requests["sparse"].request_id] <= before + 1
        assert "short" not in driver.done
        driver.finish()
        assert driver.preemptions() == [0, 1]
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)

    def test_preempted_again_and_again(self, probe, model):
        driver = Counting(probe)
        driver.add("sparse", prompt_of(120, seed=2), 60)
        driver.step(6)
        for times in range(20):
            driver.preempt("sparse")
            driver.step(1 + times % 3)
            assert driver.was_sparse("sparse")
        driver.finish()
        assert driver.preemptions() == [20]
        driver.assert_right_and_all_back(model)

    @pytest.mark.parametrize("waits", [0, 3])
    def test_abort_while_it_is_preempted(self, probe, model, waits):
        driver = Counting(probe)
        driver.add("gone", prompt_of(120, seed=3), 60)
        driver.step(10)
        if waits:
            # What it needs another has until then.
            driver.add("stays", prompt_of(100, seed=4), 16)
            driver.step()
            driver.preempt("gone")
            driver.probe.scheduler.waiting.remove(driver.requests["gone"])
            driver.step(waits)
            assert all(len(part.kept) == 1 for part in probe.runtime.models)
            driver.probe.scheduler.waiting.prepend_request(driver.requests["gone"])
        else:
            driver.add("stays", prompt_of(100, seed=4), 16)
            driver.preempt("gone")
        driver.abort("gone")
        driver.finish()
        assert set(driver.done) == {"stays"}
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)

    @pytest.mark.smoke
    def test_a_prefix_that_others_use_too(self, probe, model):
        """In HBM, where vLLM caches prefixes, and in the store."""
        prefix = prompt_of(64, seed=5)
        driver = Counting(probe)
        driver.add("other", [*prefix, 1, 2], 40)
        driver.step(2)
        driver.add("sparse", prefix + prompt_of(56, seed=6), 60)
        driver.step(4)
        for _ in range(6):
            driver.step(3)
            driver.preempt("sparse")
            driver.step()
            assert driver.was_sparse("sparse")
        driver.finish()
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)


@pytest.mark.smoke
def test_what_is_computed_again_may_take_several_steps(tiny_folder, model):
    args = {"enable_prefix_caching": False, "long_prefill_token_threshold": 6}
    settings = {"threshold_tokens": PROMPT}
    with probed(tiny_folder, settings=settings, **args) as probe:
        driver = Counting(probe)
        driver.add("one", prompt_of(PROMPT), 60)
        driver.until(lambda: driver.was_sparse("one"))
        for steps in range(9):
            driver.step(steps)
            driver.preempt("one")
            driver.step()
            assert driver.was_sparse("one")
        driver.finish()
        driver.assert_right_and_all_back(model)


@pytest.mark.parametrize("mode", ["always", "under_pressure"])
def test_long_context_and_few_slots(tiny_folder, mode):
    """600 tokens are 38 blocks, of which 4 + 1 + 1 and what is open are in HBM once sparse."""
    settings = {"hot_tokens": 64, "budget_tokens": 32, "threshold_tokens": 200, "mode": mode}
    args = {"num_gpu_blocks_override": 80, "max_model_len": 800, "settings": settings}
    with probed(tiny_folder, enable_prefix_caching=False, **args) as probe:
        driver = Counting(probe)
        driver.add("0", prompt_of(600), 60)
        driver.step(4)
        driver.add("1", prompt_of(610, seed=1), 60)
        driver.until(lambda: driver.was_sparse("0"))
        driver.step(2)
        request = driver.requests["0"]
        assert driver.held[request.request_id] <= 4 + 1 + 1 + OPEN_BLOCKS
        for _ in range(10):
            before = driver.computed[request.request_id]
            driver.preempt("0")
            driver.step()
            assert driver.was_sparse("0")
            assert driver.held[request.request_id] <= 4 + 1 + 1 + OPEN_BLOCKS
            assert driver.computed[request.request_id] - before <= 17
            driver.step(2)
        driver.finish()
        assert set(driver.done) == {"0", "1"}
        # Workers hear of the last ends with the next step.
        greedy(probe.llm, [[1]], 1)
        probe.assert_all_back()
        assert_kept_nothing(probe)


@pytest.mark.parametrize("mode", list(LookaheadMode))
def test_while_no_token_is_sampled_the_last_one_looks_ahead(mode):
    assert StepTokens(start=96, scheduled=6, drafts=[], sampled=[]).lookahead(mode) == 5


def test_a_tile_that_is_damaged_in_the_store_ends_it_with_an_error(tiny_folder, model, tiered):
    if tiered == "at once":
        pytest.skip("checksums are of requests that are tiered one by one")
    settings = {"threshold_tokens": PROMPT, "checksums": True}
    with probed(tiny_folder, enable_prefix_caching=False, settings=settings) as probe:
        driver = Counting(probe)
        driver.add("damaged", prompt_of(PROMPT), 60)
        driver.add("other", prompt_of(PROMPT, seed=1), 30)
        driver.step(10)
        # Between sink and window.
        block = probe.state.requests[driver.requests["damaged"].request_id].store_blocks[3]
        probe.forced = False
        driver.preempt("damaged")
        probe.runtime.target.store.layer(1)[block, 0, 5] += 1
        driver.finish()
        assert driver.failed == {"damaged"}
        assert set(driver.done) == {"other"}
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)


def test_a_random_mix(tiny_folder, model):
    """Prefixes are shared, drafts are fed; any running request may be preempted, any aborted."""
    draw = random.Random(0)
    with probed(
        tiny_folder,
        speculative_config=NGRAM,
        num_gpu_blocks_override=150,
        max_num_batched_tokens=64,
        settings={"lookahead": "held_back", "threshold_tokens": 100},
    ) as probe:
        driver, waiting, aborted, preempted = Counting(probe), list(range(14)), set(), 0
        while waiting or driver.engine.has_unfinished_requests():
            if waiting and draw.random() < 0.3:
                index = waiting.pop()
                prompt = prompt_of(draw.choice([40, 96]), seed=index % 2)
                prompt += prompt_of(draw.randint(1, 60), seed=index)
                driver.add(str(index), prompt, draw.randint(5, 30))
            running = set(probe.scheduler.running)
            names = [name for name, r in driver.requests.items() if r in running]
            if names and draw.random() < 0.3:
                driver.preempt(draw.choice(names))
                preempted += 1
            if names and draw.random() < 0.03:
                name = draw.choice(names)
                driver.abort(name)
                aborted.add(name)
            driver.step()
        assert driver.done.keys() | aborted == set(map(str, range(14)))
        assert preempted > 15
        assert len(probe.sparse) > 5
        assert aborted
        driver.assert_right_and_all_back(model)
        assert_kept_nothing(probe)
