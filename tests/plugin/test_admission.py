"""By whatever way a request is admitted, vLLM allocates what the manager said, it reads its own
tokens, and others find by content only what was computed from all before it.

vLLM's scheduler and ours, with a worker that is simulated: no model runs.
"""

import random
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from plugin.probe import NGRAM
from plugin.simulated import Simulation
from plugin.simulated_parts import SIZE, simulated_config
from tiny import prompt_of

THRESHOLD = 100


@pytest.fixture(scope="module")
def roomy(tiny_folder):
    with simulated_config(tiny_folder, 200) as config:
        yield config


PHASES = {
    # Where to preempt a request: its prompt, and until when it runs before.
    "never": (90, None),
    "prompt": (90, "prompt"),
    "decoding": (70, "decoding"),
    "in transition": (150, "in transition"),
    "sparse": (90, "sparse"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_every_way_in(roomy, phase):
    """Where its prefix is and how much of it; whether it reads any; preempted twice in a phase."""
    length, preempt_at = PHASES[phase]
    seen = set()
    for place, shared, reads in product(
        ["HBM", "store", "both", "neither"], [0, 40, length], [True, False]
    ):
        run = Simulation(roomy, random.Random(0), 200)
        prompt = prompt_of(length)
        found = 0
        if shared:
            run.add("before", prompt[:shared], 3)
            run.finish()
            if place in ("store", "neither"):
                run.forget_hbm()
            if place in ("HBM", "neither"):
                run.forget_store()
            if place != "neither":
                found = min(shared + 2, length - 1) // SIZE * SIZE
        run.add("own", prompt, THRESHOLD + 60 - length, reads)
        for _ in range(2 if preempt_at else 0):
            for _ in range(200):
                run.step()
                if run.requests["own"] in run.scheduler.running and run.phase("own") == preempt_at:
                    seen.add(preempt_at)
                    run.preempt("own")
                    break
        run.finish()
        assert len(run.requests["own"].output_token_ids) == THRESHOLD + 60 - length
        if preempt_at is None:
            assert run.found["own"] == (found if reads else 0)
        # All of its prompt, and what it decoded dense, is there for the next one.
        dense = max(length, THRESHOLD)
        run.add("after", run.requests["own"].all_token_ids[: dense + 1], 2)
        run.finish()
        assert run.found["after"] == dense // SIZE * SIZE
        run.assert_all_back()
    assert seen == ({preempt_at} if preempt_at else set())


KINDS = st.sampled_from(["reads", "skips", "session"])
LENGTHS = st.integers(1, 150)
ADD = st.tuples(st.just("add"), KINDS, LENGTHS, st.integers(0, 3), st.integers(1, 120))
REST = st.tuples(
    st.sampled_from(
        [
            "step",
            "step",
            "preempt",
            "preempt all",
            "new weights",
            "abort",
            "forget HBM",
            "forget store",
        ]
    ),
    st.integers(0, 40),
)


class Mix:
    """Carries out what hypothesis asks for."""

    def __init__(self, run):
        self.run, self.added, self.sessions = run, 0, set()

    def add(self, kind, length, seed, new):
        run = self.run
        if len(run.scheduler.requests) >= 10:
            return
        name = str(self.added)
        self.added += 1
        run.add(
            name, prompt_of(length, seed=seed), new, kind != "skips", resumable=kind == "session"
        )
        if kind == "session":
            self.sessions.add(name)

    def do(self, what, number):
        run, running = self.run, self.run.running
        if what == "step":
            for _ in range(number):
                run.step()
                self.go_on()
        elif what == "preempt" and running:
            run.preempt(running[number % len(running)])
        elif what == "preempt all":
            run.preempt_all()
        elif what == "new weights" and not self.sessions:
            # One that waits for its next part is not preempted.
            run.new_weights()
        elif what == "abort" and run.scheduler.requests:
            names = sorted(run.scheduler.requests)
            name = names[number % len(names)]
            run.abort(name)
            self.sessions.discard(name)
        elif what == "forget HBM":
            run.forget_hbm()
        elif what == "forget store":
            run.forget_store()

    def go_on(self):
        """The next part of a session that waits for one; after some it ends."""
        for name in sorted(self.sessions):
            request = self.run.requests[name]
            if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                if request.num_tokens > 220 or self.run.draw.random() < 0.3:
                    self.sessions.remove(name)
                    self.run.end_session(name)
                else:
                    part = prompt_of(self.run.draw.randint(1, 60), seed=7)
                    self.run.add(name, part, self.run.draw.randint(1, 20), resumable=True)

    def finish(self):
        for _ in range(3000):
            if not self.sessions:
                break
            self.run.step()
            self.go_on()
        assert not self.sessions
        self.run.finish()


@pytest.fixture(
    scope="module",
    params=[(m, d) for m in ("always", "under_pressure") for d in (None, NGRAM)],
    ids=str,
)
def tight(tiny_folder, request):
    mode, drafts = request.param
    with simulated_config(tiny_folder, 24, mode=mode, drafts=drafts) as config:

        def simulate(*args):
            # A function, for hypothesis cannot print vLLM's configuration.
            return Simulation(config, *args)

        yield simulate


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    asked=st.lists(st.one_of(ADD, REST), max_size=40),
    seed=st.integers(0, 9),
    late=st.sampled_from([0.0, 0.5]),
    pool=st.integers(25, 40),
)
def test_any_mix(tight, asked, seed, late, pool):
    run = tight(random.Random(seed), pool, late)
    mix = Mix(run)
    for what, *with_ in asked:
        if what == "add":
            mix.add(*with_)
        else:
            mix.do(what, *with_)
    mix.finish()
    run.assert_all_back()
