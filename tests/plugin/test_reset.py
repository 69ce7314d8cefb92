"""New weights: what was computed with the old ones is not found, nor comes back, once reset."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import RequestStatus

from oasiskv.stores.prefix import PrefixBlocks
from oasiskv.vllm import runtime
from oasiskv.vllm.scheduling import ScheduledRequest, SchedulerState
from plugin.driver import Driver
from plugin.probe import is_greedy, probed
from tiny import prompt_of


class Router:
    """Who hears the KV events of an engine.

    Attributes:
        blocks: medium -> block hash -> ``(hash before, tokens, whatever else was said of it)``.
    """

    def __init__(self, scheduler):
        self.blocks = {"GPU": {}, "CPU": {}}
        scheduler.kv_event_publisher.publish = self._hear

    def _hear(self, batch):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks["GPU"].clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[event.medium][block]
            else:
                self._store(event)

    def _store(self, event):
        assert isinstance(event, BlockStored)
        known, before = self.blocks[event.medium], event.parent_block_hash
        size, keys = event.block_size, event.extra_keys
        assert len(event.token_ids) == size * len(event.block_hashes) == size * len(keys)
        about = (event.lora_id, event.lora_name, event.group_idx, event.kv_cache_spec_kind)
        for index, block in enumerate(event.block_hashes):
            # The store says it once; HBM may hold the same content twice.
            assert block not in known or event.medium == "GPU"
            tokens = event.token_ids[index * size : (index + 1) * size]
            known[block] = (before, tokens, size, keys[index], *about)
            before = block


class Engine:
    """A probed engine, a model with the weights that it has now, and a router."""

    def __init__(self, probe, model):
        self.probe, self.llm, self.model = probe, probe.llm, model
        self.router = Router(probe.scheduler)
        self._factor = 1.25

    def renew_weights(self):
        """Others than those before, in the engine and in the model."""
        factor, self._factor = self._factor, 1 / self._factor

        def scale(model):
            # vLLM has copies of other weights.
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.data *= factor

        self.llm.collective_rpc(lambda worker: scale(worker.model_runner.model))
        scale(self.model)

    def ask(self, prompt, **settings):
        """``(20 greedy tokens, prompt tokens found)``."""
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **settings)
        [output] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def found(self, prompt):
        """Prompt tokens that the store has; and what is answered is of the weights of now."""
        assert self.llm.reset_prefix_cache()
        tokens, found = self.ask(prompt)
        assert is_greedy(self.model, prompt, tokens)
        return found

    def assert_all_back(self):
        """Also of requests whose tokens are of two weights; and the router knows the store."""
        driver = Driver(self.probe)
        driver.assert_right_and_all_back(self.model)
        assert not any(part.kept for part in self.probe.runtime.models)
        known = self.probe.state.store._block_of
        assert self.router.blocks["CPU"].keys() == set(map(maybe_convert_block_hash, known))


@pytest.fixture(scope="module", params=["one by one", "at once"])
def engine(request, tiny_folder):
    """Exact up to 448 tokens; sparse past 160."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        with probed(
            tiny_folder,
            kv_events_config=events,
            num_gpu_blocks_override=400,
            max_num_batched_tokens=64,
            settings={"threshold_tokens": 160},
        ) as probe:
            yield Engine(
                probe, AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
            )


def pause(llm):
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep")
    core.resume_scheduler()


def sleep(llm):
    llm.sleep(2)
    llm.wake_up()


RESETS = {
    "reset": lambda llm: llm.reset_prefix_cache(reset_connector=True),
    "pause": pause,
    "sleep": sleep,
}


@pytest.mark.smoke
@pytest.mark.parametrize("way", RESETS)
def test_nothing_of_old_weights_is_found(engine, way):
    prompt = prompt_of(200)
    before, _ = engine.ask(prompt)
    assert engine.found(prompt) == 192
    engine.renew_weights()
    assert not is_greedy(engine.model, prompt, before)
    assert RESETS[way](engine.llm) in (True, None)
    assert engine.probe.state.store.kept_blocks == 0
    tokens, found = engine.ask(prompt)
    assert found == 0
    assert is_greedy(engine.model, prompt, tokens)
    # It is a prefix cache as before.
    assert engine.found(prompt) == 192
    engine.assert_all_back()


@pytest.mark.smoke
def test_running_requests_compute_everything_again(engine):
    """In each state that a request may be in, all at once."""
    driver, scheduler = Driver(engine.probe), engine.probe.scheduler
    phases = ("preempted for long", "preempted", "sparse", "dense", "in prefill")
    prompts = {name: prompt_of(200, seed=seed) for seed, name in enumerate(phases)}
    prompts["dense"] = prompts["dense"][:100]

    def state_of(name):
        return engine.probe.state.requests[driver.requests[name].request_id]

    for name in phases[:4]:
        driver.add(name, prompts[name], 60)
    driver.until(lambda: all(state_of(name).window_start for name in phases[:3]))
    driver.preempt("preempted for long")
    # Elsewhere, so that it does not come back before the workers have heard of it.
    long = driver.requests["preempted for long"]
    scheduler.waiting.remove(long)
    driver.step()
    assert all(part.kept for part in engine.probe.runtime.models)
    driver.add("in prefill", prompts["in prefill"], 60)
    driver.step()
    driver.preempt("preempted")
    scheduler.waiting.prepend_request(long)
    driver.add("waiting", prompts["preempted"], 60)

    assert state_of("preempted").resume_start
    assert state_of("preempted for long").resume_start
    assert state_of("sparse").window_start
    assert not state_of("dense").hot
    assert [*engine.probe.state.in_transition] == [driver.requests["in prefill"].request_id]
    old = {name: list(request.output_token_ids) for name, request in driver.requests.items()}
    engine.renew_weights()
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.probe.state.store.free_blocks == engine.probe.state.store.capacity_blocks
    driver.finish()
    for name, tokens in driver.done.items():
        prompt, kept = driver.prompts[name] + old[name], len(old[name])
        assert tokens[:kept] == old[name]
        assert is_greedy(engine.model, prompt, tokens[kept:]), name
    assert len(driver.done) == 6
    # What they computed again is what others find.
    for name in ("preempted", "sparse", "dense"):
        prompt = driver.prompts[name] + old[name]
        assert engine.found(prompt) == (len(prompt) - 1) // 16 * 16
    engine.assert_all_back()


def test_what_a_request_computed_before_is_nobodys_prefix_however_long_it_runs(engine):
    """vLLM says that it could not reset all, and lets those that run go on with what they have."""
    driver = Driver(engine.probe)
    prompts = {"sparse": prompt_of(200, seed=11), "dense": prompt_of(100, seed=12)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, 50)
    driver.step(12)
    assert engine.probe.state.requests[driver.requests["sparse"].request_id].window_start
    engine.renew_weights()
    assert not engine.llm.reset_prefix_cache(reset_connector=True)
    # One that came later is as any other.
    driver.add("later", prompt_of(100, seed=13), 20)
    driver.finish()
    assert engine.found(prompts["sparse"] + driver.done["sparse"]) == 0
    # Others store the prompt again; what follows it would be found behind that.
    assert engine.found(prompts["dense"]) == 0
    assert engine.found(prompts["dense"] + driver.done["dense"]) == 96
    assert engine.found(driver.prompts["later"]) == 96
    engine.assert_all_back()


def test_one_that_ran_on_and_is_preempted_starts_anew(engine):
    driver = Driver(engine.probe)
    driver.add("one", prompt_of(200, seed=21), 60)
    driver.step(12)
    request = driver.requests["one"]
    engine.renew_weights()
    assert not engine.llm.reset_prefix_cache(reset_connector=True)
    driver.step(3)
    old = list(request.output_token_ids)
    driver.preempt("one")
    assert engine.llm.reset_prefix_cache()
    driver.finish()
    assert is_greedy(engine.model, driver.prompts["one"] + old, driver.done["one"][len(old) :])
    prompt = driver.prompts["one"] + old
    assert engine.found(prompt) == (len(prompt) - 1) // 16 * 16
    engine.assert_all_back()


@pytest.mark.smoke
def test_a_router_hears_of_the_store_what_it_hears_of_hbm(engine):
    prompt = prompt_of(150, seed=31)
    engine.ask(prompt)
    hbm, store = engine.router.blocks["GPU"], engine.router.blocks["CPU"]
    # What an answer closes is known to HBM before the store has it, or never.
    closed = [prompt[start : start + 16] for start in range(0, 144, 16)]
    mine = [block for block, (_, tokens, *_) in store.items() if list(tokens) in closed]
    assert len(mine) == len(closed)
    assert all(store[block] == hbm[block] for block in mine)
    engine.assert_all_back()


def scheduled(name, hashes="abcd", tokens=64):
    """A request on the scheduler side, with four blocks in the store."""
    request = SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        status=RequestStatus.RUNNING,
        num_prompt_tokens=tokens,
        max_tokens=0,
        resumable=False,
        is_finished=lambda: request.status is not RequestStatus.RUNNING,
    )
    return ScheduledRequest(request, tokens)


@pytest.fixture
def state():
    """One request that has four blocks in the store, in a step."""
    state = SchedulerState()
    state.store, state.shares = PrefixBlocks(8, 1), True
    one = state.requests["one"] = scheduled("one")
    state.admit("one", 4, 64)
    one.store_blocks = state.store.reserve(4)
    one.in_step = True
    return state


def end(state):
    state.requests["one"].request.status = RequestStatus.FINISHED_STOPPED
    state.forget("one")


class TestState:
    """What vLLM cannot be made to do in a test, or not in time."""

    def test_a_step_from_before_is_acknowledged_after(self, state):
        state.reset()
        state.acknowledge("one", 4, None)
        assert state.requests["one"].published == 0
        assert state.store.match("abcd") == []

    def test_it_has_ended_in_that_step(self, state):
        end(state)
        state.reset()
        state.acknowledge("one", 4, None)
        assert state.store.match("abcd") == []
        assert (state.store.free_blocks, state.store.kept_blocks) == (8, 0)

    def test_what_is_held_for_late_completions_is_free_after_them(self, state):
        state.acknowledge("one", 4, None)
        assert len(state.store.match("abcd")) == 4
        state.take_in_flight({"one"})
        end(state)
        state.reset()
        assert state.store.match("abcd") == []
        assert state.store.free_blocks == 4
        state.take_in_flight(set())
        assert (state.store.free_blocks, state.store.kept_blocks) == (8, 0)

    def test_blocks_of_a_preempted_one_wait_for_late_completions(self, state):
        state.acknowledge("one", 4, None)
        state.take_in_flight({"one"})
        state.forget("one")
        state.reset()
        assert state.requests["one"].store_blocks == []
        assert state.store.free_blocks == 4
        state.take_in_flight(set())
        assert state.store.free_blocks == 8
        assert state.promised == 4

    def test_the_workers_forget_the_slots_of_one_that_was_to_come_back_sparse(self, state):
        one = state.requests["one"]
        one.hot_sent = True
        state.acknowledge("one", 4, 3)
        state.forget("one")
        assert state.dropped == {"one": True}
        state.dropped = {}
        state.reset()
        assert state.dropped == {"one": False}
        assert (one.resume_start, one.stored, one.published) == (0, 0, 0)
        assert one.closed_dense is None

    def test_what_was_matched_is_not_loaded(self, state):
        state.acknowledge("one", 4, None)
        other = state.requests["other"] = scheduled("other")
        other.matched = state.store.match("abcd")
        state.reset()
        assert other.matched == []
        assert "other" not in state.dropped
