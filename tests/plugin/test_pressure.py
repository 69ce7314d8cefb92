"""Mode ``under_pressure``: dense while the pool has room, and no more sparse than it lacks.

A sparse request reads less than the context, so its tokens are compared with those of the reference
engine that makes the transition at the same place; those of the others are the model's greedy ones.
"""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.config import OasisConfig
from oasiskv.hf import Engine, load_model
from oasiskv.stores.host import HostStore
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of

SINK, HOT, WINDOW = 1, 6, 1
SIZES = {"budget_tokens": 64, "hot_tokens": 96, "sink_tokens": 16, "window_tokens": 16}
PAST = 144
POOL = 96


class Replay:
    """Proposes the drafts that vLLM proposed after the same tokens."""

    def __init__(self, drafts):
        self._drafts = drafts

    def propose(self, request_id, tokens, max_drafts):
        return self._drafts.get(len(tokens), [])[:max_drafts]

    def finish(self, request_id):
        pass


class Watch(Driver):
    """A driver that notes what each request was fed, and when it went sparse.

    Attributes:
        sparse: ids of requests that went sparse, in that order, with their tokens then.
        lengths: per transition, the tokens of the requests that could have made it and did not.
    """

    def __init__(self, probe):
        super().__init__(probe)
        self.sparse, self.lengths, self.drafts = {}, [], {}
        probe.runtime.observer = self.observe

    def observe(self, record):
        name = next(n for n, r in self.requests.items() if r.request_id == record.request_id)
        computed = record.tokens.computed
        at = computed - len(record.accepted) + 1
        self.drafts.setdefault(name, {})[at] = record.drafts
        sparse = self.probe.runtime.target.window_start(record.request_id) is not None
        if sparse and name not in self.sparse:
            self.sparse[name] = computed
            others = self.probe.state.may_go_sparse.values()
            decoding = [r.request for r in others if r.request.num_output_tokens]
            self.lengths.append([r.num_tokens for r in decoding if r.num_tokens > PAST])

    def assert_right(self, folder, model):
        loaded = load_model(folder)
        for name, tokens in self.done.items():
            prompt = self.prompts[name]
            assert len(tokens) == self.requests[name].max_tokens
            if name not in self.sparse:
                assert is_greedy(model, prompt, tokens), name
                continue
            config = OasisConfig(
                **SIZES,
                threshold_tokens=self.sparse[name] - 1,
                lookahead=self.probe.runtime.config.lookahead,
            )
            store = HostStore(loaded.geometry, 100)
            reference = Engine(loaded, config, store, Replay(self.drafts[name]))
            request = reference.submit(name, prompt, len(tokens))
            for output in reference.stream():
                assert output.error is None
            assert tokens == request.output, name

    def assert_all_back(self):
        # Workers hear of the last ends with the next step.
        self.probe.runtime.observer = None
        greedy(self.probe.llm, [[1]], 1)
        self.probe.assert_all_back()


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


ENGINES = {
    "no drafts": {"settings": {"lookahead": "last_accepted"}},
    "ngram": {"settings": {"lookahead": "held_back"}, "speculative_config": NGRAM},
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES.keys())
def probe(request, tiny_folder, model):
    settings = {**SIZES, "threshold_tokens": PAST, "mode": "under_pressure"}
    args = request.param | {"settings": settings | request.param["settings"]}
    with probed(
        tiny_folder,
        refetch=False,
        num_gpu_blocks_override=POOL + 1,
        enable_prefix_caching=False,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        **args,
    ) as probe:
        yield probe


def test_a_request_stays_dense_while_there_is_room(probe, model, tiny_folder):
    driver = Watch(probe)
    driver.add("long", prompt_of(700), 120)
    driver.finish()
    assert not driver.sparse
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


def test_the_longest_go_sparse_as_the_pool_fills(probe, model, tiny_folder):
    """Dense to their ends they need 121 blocks of 96."""
    driver = Watch(probe)
    for length in (200, 300, 260, 280, 150):
        driver.add(str(length), prompt_of(length), 140)
    driver.finish()
    assert driver.preemptions() == [0] * 5
    assert list(driver.sparse) == ["300", "280"]
    for tokens, others in zip(driver.sparse.values(), driver.lengths, strict=True):
        assert tokens >= max(others)
    # It was about to run out, and no sooner.
    assert probe.in_use > POOL - HOT - 10
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


@pytest.mark.parametrize(("prompt", "count", "free"), [(176, 8, 18), (129, 10, 23)])
def test_a_full_pool_of_requests_that_grow_together(probe, model, tiny_folder, prompt, count, free):
    """They need a block each in the same steps: at once, and when they pass the threshold."""
    driver = Watch(probe)
    driver.add("tiny", [1], 15)
    for index in range(count):
        driver.add(str(index), prompt_of(prompt, seed=index), 40)
    driver.step()
    assert POOL - probe.used == free
    driver.finish()
    assert len(driver.sparse) > 3
    assert driver.preemptions() == [0] * (1 + count)
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


def test_one_that_waits_and_does_not_fit_is_let_in(probe, model, tiny_folder):
    driver = Watch(probe)
    driver.add("300", prompt_of(300), 100)
    driver.add("400", prompt_of(400), 100)
    driver.step(4)
    assert not driver.sparse
    driver.add("waits", prompt_of(700), 20)
    driver.step(4)
    assert list(driver.sparse) == ["400"]
    assert driver.requests["waits"].num_computed_tokens > 0
    driver.finish()
    assert list(driver.sparse) == ["400"]
    assert driver.preemptions() == [0] * 3
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


def test_nobody_goes_sparse_for_one_that_would_still_not_fit(probe, model, tiny_folder):
    driver = Watch(probe)
    for index in range(4):
        driver.add(f"short {index}", prompt_of(120, seed=index), 20)
    driver.add("200", prompt_of(200), 80)
    driver.step(2)
    driver.add("waits", prompt_of(740), 20)
    driver.step(4)
    assert driver.requests["waits"].num_computed_tokens == 0
    driver.finish()
    assert not driver.sparse
    assert driver.preemptions() == [0] * 6
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


@pytest.mark.parametrize("when", ["slots taken", "acknowledged", "given back"])
def test_abort_of_one_that_was_chosen(probe, model, tiny_folder, when):
    driver = Watch(probe)
    driver.add("300", prompt_of(300), 60)
    driver.add("400", prompt_of(400), 60)
    driver.step(2)
    driver.add("waits", prompt_of(700), 20)
    state = probe.state.requests[driver.requests["400"].request_id]

    def abort_in_step(runtime):
        probe(runtime)
        if state.hot:
            driver.abort("400")

    if when == "slots taken":
        probe.runtime.before_step = abort_in_step
    while not state.hot and not state.request.is_finished():
        driver.step()
    probe.runtime.before_step = probe
    blocks = probe.manager.req_to_blocks.get(state.request.request_id, [])
    assert not any(block.is_null for block in blocks)
    assert state.request.is_finished() == (when == "slots taken")
    if when == "given back":
        driver.step()
        assert any(block.is_null for block in blocks)
    driver.abort("400")
    driver.finish()
    assert driver.done.keys() == {"300", "waits"}
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()


def test_a_random_mix(probe, model, tiny_folder):
    """What the scheduler side counts is checked in each step, by the probe."""
    draw = random.Random(1)
    driver, waiting, aborted = Watch(probe), list(range(80)), set()
    while waiting or driver.engine.has_unfinished_requests():
        for _ in range(min(len(waiting), draw.choice([0, 0, 1, 4]))):
            index = waiting.pop()
            length = 1 + int(600 * draw.random() ** 2)
            driver.add(str(index), prompt_of(length, seed=index), draw.randint(1, 50))
        if draw.random() < 0.05 and driver.requests:
            name = draw.choice(list(driver.requests))
            driver.abort(name)
            if name not in driver.done:
                aborted.add(name)
        driver.step()
    assert driver.done.keys() | aborted == set(map(str, range(80)))
    assert len(aborted) > 3
    past = {name for name, r in driver.requests.items() if r.num_tokens > PAST}
    assert 5 < len(driver.sparse) < len(past) - 5
    assert sum(driver.preemptions()) == 0
    driver.assert_right(tiny_folder, model)
    driver.assert_all_back()
