"""Many requests of all kinds on a host store with faults; nothing is wrong, and nothing is left.

By default a small one; all of it with ``-m soak``.
"""

import logging
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.testing.in_vllm import faulty_stores
from plugin.driver import Driver
from plugin.leftovers import own, ownerless
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of

log = logging.getLogger(__name__)
CHECKED = 10
"""One in so many has its tokens checked."""


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


class Soak:
    """Requests of random length, arrival, priority and end."""

    def __init__(self, probe, draw, rotting=None):
        self.driver, self.draw, self.rotting = Driver(probe), draw, rotting
        self.aborted, self.held = set(), 0

    def add(self, index):
        draw = self.draw
        length = draw.choice([draw.randint(80, 125), 1 + int(300 * draw.random() ** 3)])
        prompt = prompt_of(length, seed=index)
        if draw.random() < 0.5:
            # A prefix that others have.
            prompt = prompt_of(draw.choice([32, 64, 100]), seed=-draw.randint(1, 5)) + prompt[:100]
        self.driver.add(str(index), prompt, draw.randint(1, 16), priority=draw.randint(0, 2))

    def abort(self):
        driver = self.driver
        running = driver.requests.keys() - driver.done.keys() - driver.failed - self.aborted
        if running:
            name = self.draw.choice(sorted(running))
            driver.abort(name)
            self.aborted.add(name)

    def preempt(self):
        """One that runs, whatever it has under way."""
        running = {request.request_id for request in self.driver.probe.scheduler.running}
        requests = self.driver.requests.items()
        names = sorted(name for name, request in requests if request.request_id in running)
        if names:
            self.driver.preempt(self.draw.choice(names))

    def forget(self):
        """Prefixes are looked for in the store from here on, but for those that somebody uses."""
        pool = self.driver.probe.pool
        pool.evict_blocks({block.block_id for block in pool.blocks if not block.ref_cnt})

    def step(self):
        if self.draw.random() < 0.15:
            self.abort()
        if self.draw.random() < 0.1:
            self.preempt()
        if self.draw.random() < 0.3:
            self.forget()
        if self.rotting is not None and self.draw.random() < 0.2:
            stored = [r.store_blocks for r in self.driver.probe.state.requests.values()]
            self.rotting.flip_a_bit(self.draw.choice(sum(stored, [0])))
        self.driver.step()
        self.held += len(self.driver.probe.state.held)

    def run(self, count, waiting=12):
        """``count`` requests, at most ``waiting`` at a time that have not ended."""
        index = 0
        while index < count or self.driver.engine.has_unfinished_requests():
            room = waiting - len(self.driver.probe.scheduler.requests)
            for _ in range(min(room, count - index, self.draw.choice([0, 1, 4]))):
                self.add(index)
                index += 1
            self.step()


def soak(folder, model, count, seed, damage):
    """Returns the requests that were preempted, aborted and failed, and how many were held."""
    draw = random.Random(seed)
    faults = {"seed": seed, "idle": 0.9}
    args = {"num_gpu_blocks_override": 55, "max_num_batched_tokens": 128}
    settings = {"threshold_tokens": 116, "hot_tokens": 320, "checksums": damage}
    with (
        faulty_stores(**faults) as stores,
        # A damaged tile leaves what a slot held, which forced refetches take away.
        probed(
            folder, False, settings, scheduling_policy="priority", max_model_len=352,
            speculative_config=None if damage else NGRAM, **args,
        ) as probe,
    ):  # fmt: skip
        probe.forced = not damage
        run = Soak(probe, draw, stores[0] if damage else None)
        run.run(count)
        driver = run.driver
        driver.drain()
        assert not stores[0].pending
        assert damage or not driver.failed
        ended = driver.done.keys() | driver.failed | run.aborted
        assert ended == set(driver.requests)
        for name in sorted(driver.done)[::CHECKED]:
            assert len(driver.done[name]) == driver.requests[name].max_tokens
            assert is_greedy(model, driver.prompts[name], driver.done[name]), name
        probe.assert_all_back()
        return sum(driver.preemptions()), len(run.aborted), len(driver.failed), run.held


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize(
    "count", [75, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_soak(tiny_folder, model, count, damage):
    with probed(tiny_folder):
        # What an engine leaves in its process on principle, such as threads of a pool.
        pass
    before = ownerless(), own()
    preempted, aborted, failed, held = soak(tiny_folder, model, count, count, damage)
    log.info("%d preempted, %d aborted, %d failed, %d held", preempted, aborted, failed, held)
    assert aborted > count // 20
    assert preempted > count // 20
    if count > 100:
        assert held > 0
        assert (failed > 0) == damage
    assert ownerless() <= before[0]
    assert own() == before[1]
