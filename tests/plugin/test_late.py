"""Requests that end, or are preempted, while the host store still has to read or write for them.

v: vllm-project/vllm, a: vllm-project/vllm-ascend, whose users reported such faults. Without waiting
for the workers, what comes late lands in blocks that are another's by then: its tokens are wrong.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.testing.in_vllm import faulty_stores
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import is_greedy, probed
from tiny import prompt_of


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


class Stalled:
    """An engine whose store holds back what it is told to, and sends the rest, all of it twice."""

    def __init__(self, probe, stores, late):
        self.probe, self.late = probe, late
        [self.store] = stores
        self.driver = Driver(probe)

    def hold(self, name, *kinds, step=None):
        """Hold back writes, or transfers, of a request; those of one step, or all."""
        known = self.driver.requests[name].request_id
        self.late += [(known, kind, step) for kind in kinds]

    def pending(self, name):
        """Kinds of what is on its way for a request."""
        known = self.driver.requests[name].request_id
        return {ticket.kind for ticket in self.store.pending if ticket.request_id == known}

    def held(self, name):
        """What the scheduler keeps for a request that is gone."""
        return self.probe.state.held.get(self.driver.requests[name].request_id)


@contextmanager
def stalled(folder, refetch=True, settings=None, **engine_args):
    late = []

    def is_late(ticket):
        known = ticket.request_id, ticket.kind
        return (*known, None) in late or (*known, ticket.step) in late

    with (
        faulty_stores(repeat=1.0, late=is_late) as stores,
        probed(folder, refetch, settings, **engine_args) as probe,
    ):
        yield Stalled(probe, stores, late)


class TestAborted:
    """While it is stored, in one engine."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_folder):
        args = {"num_gpu_blocks_override": 150, "max_num_batched_tokens": 64}
        with stalled(tiny_folder, settings={"threshold_tokens": 100}, **args) as engine:
            yield engine

    @pytest.mark.parametrize("late", [False, True])
    def test_its_store_blocks_are_nobodys_until_it_is_written(self, engine, model, late):
        engine.driver = driver = Driver(engine.probe)
        driver.add("gone", prompt_of(200, seed=2 * late), 20)
        engine.hold("gone", "write")
        driver.step(2)
        assert engine.pending("gone") == {"write"}
        if not late:
            engine.late.clear()
            driver.step()
        driver.abort("gone")
        driver.add("stays", prompt_of(200, seed=2 * late + 1), 20)
        driver.step(5)
        assert (engine.held("gone") is not None) == late
        # The other has filled store blocks; now comes what was held back.
        engine.late.clear()
        driver.finish()
        assert not engine.pending("gone")
        driver.assert_right_and_all_back(model)

    def test_a16662_again_and_again(self, engine, model):
        free = engine.probe.state.store.free_blocks
        for round_ in range(20):
            engine.driver = driver = Driver(engine.probe)
            driver.add("gone", prompt_of(250, seed=100 + round_), 20)
            engine.hold("gone", "write")
            driver.step(1 + round_ % 3)
            assert engine.pending("gone") == {"write"}
            driver.abort("gone")
            engine.late.clear()
        engine.driver = driver = Driver(engine.probe)
        driver.drain()
        driver.assert_right_and_all_back(model)
        assert engine.probe.state.store.free_blocks == free


class TestAbortedSparse:
    """With transfers on their way; those that stay are dense, so that their tokens are exact."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_folder):
        settings = {"threshold_tokens": 100, "budget_tokens": 32, "hot_tokens": 32}
        settings |= {"cap_fraction": 1.0, "hysteresis": 1.0}
        args = {"num_gpu_blocks_override": 68, "max_num_batched_tokens": 256}
        with stalled(tiny_folder, False, settings, **args) as engine:
            yield engine

    def abort_with(self, engine, *kinds):
        """A sparse request is aborted while these are on their way."""
        return self.leave_with(engine, Driver.abort, *kinds)

    def leave_with(self, engine, leave, *kinds):
        """A sparse request is aborted or preempted while these are on their way."""
        engine.driver = driver = Driver(engine.probe)
        driver.add("gone", prompt_of(200), 300)
        # It waits for what it was to read or write before it could go on, but for this.
        driver.step(2)
        for _ in range(200):
            engine.hold("gone", *kinds, step=engine.probe.runtime.target.step_number + 1)
            driver.step()
            if engine.pending("gone") == set(kinds):
                break
            engine.late.clear()
        slots = engine.probe.state.requests[driver.requests["gone"].request_id].hot
        leave(driver, "gone")
        driver.add("stays", prompt_of(80), 15)
        driver.step(3)
        assert engine.held("gone").slots == slots
        return driver

    def test_v43226_a_transfer_is_completed_after_its_request_was_aborted(self, engine, model):
        driver = self.abort_with(engine, "read")
        ignored = engine.probe.runtime.target.tiering.ignored
        engine.late.clear()
        driver.finish()
        assert set(driver.done) == {"stays"}
        driver.drain()
        assert engine.probe.runtime.target.tiering.ignored > ignored
        driver.assert_right_and_all_back(model)

    @pytest.mark.parametrize("first", ["read", "write", "both"])
    def test_v56089_transfer_and_write_at_abort(self, engine, model, first):
        driver = self.abort_with(engine, "read", "write")
        if first != "both":
            engine.late[:] = [entry for entry in engine.late if entry[1] != first]
            driver.step(3)
            assert engine.pending("gone") == {"read", "write"} - {first}
            assert engine.held("gone") is not None
        engine.late.clear()
        driver.finish()
        driver.drain()
        driver.assert_right_and_all_back(model)

    def test_a_transfer_is_completed_after_its_request_was_preempted(self, engine, model):
        driver = self.leave_with(engine, Driver.preempt, "read")
        known = driver.requests["gone"].request_id
        assert known not in engine.probe.state.admitted
        engine.late.clear()
        driver.until(lambda: known in engine.probe.state.admitted)
        assert engine.probe.runtime.target.window_start(known) > 0
        driver.finish()
        # Few slots: what it decodes is not exact.
        assert len(driver.done.pop("gone")) == 300
        driver.drain()
        driver.assert_right_and_all_back(model)


def test_a_write_is_completed_after_its_sparse_request_was_preempted(tiny_folder, model):
    with stalled(tiny_folder, False, settings={"threshold_tokens": 100}) as engine:
        engine.driver = driver = Driver(engine.probe)
        driver.add("one", prompt_of(120), 60)
        known = driver.requests["one"].request_id
        driver.until(lambda: engine.probe.state.requests[known].window_start)
        engine.hold("one", "write")
        driver.until(lambda: engine.pending("one"))
        driver.step(3)
        driver.preempt("one")
        assert engine.held("one").store_blocks
        driver.step(3)
        assert known not in engine.probe.state.admitted
        engine.late.clear()
        driver.until(lambda: known in engine.probe.state.admitted)
        assert engine.probe.runtime.target.window_start(known) > 0
        driver.finish()
        driver.drain()
        driver.assert_right_and_all_back(model)


class TestPreempted:
    """In a pool for one and a half."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_folder):
        args = {"num_gpu_blocks_override": 1 + 16 + 4, "max_model_len": 256}
        with stalled(tiny_folder, settings={"threshold_tokens": 256}, **args) as engine:
            yield engine

    def test_v52360_v46014_while_it_is_stored(self, engine, model):
        engine.driver = driver = Driver(engine.probe)
        driver.add("first", prompt_of(100, seed=1), 120)
        driver.add("second", prompt_of(100, seed=2), 100)
        engine.hold("second", "write")
        driver.until(lambda: driver.requests["second"].num_preemptions)
        assert engine.held("second").store_blocks
        driver.add("same", prompt_of(100, seed=2), 100)
        driver.until(lambda: "first" in driver.done)
        # Nothing runs, and yet vLLM asks the workers whether all is written.
        steps = engine.probe.steps
        driver.step(10)
        assert engine.probe.steps == steps + 10
        assert engine.held("second").store_blocks
        assert not engine.probe.state.admitted
        engine.late.clear()
        driver.finish()
        assert set(driver.done) == {"first", "second", "same"}
        driver.assert_right_and_all_back(model)
        # What the store holds of them is theirs.
        for name, prompt in driver.prompts.items():
            assert engine.probe.llm.reset_prefix_cache()
            text = prompt + driver.done[name]
            [tokens] = greedy(engine.probe.llm, [text], 4)
            assert is_greedy(model, text, tokens), name
