"""Chapters of the soak in an engine with OasisKV whose pool and store are too small for them."""

import math
import random

from plugin.engines import greedy
from plugin.soak.asking import Asking
from plugin.soak.stock import Weights

TIE = 1e-4
"""Log-probabilities that are closer may swap places where sums are added in another order."""
CLOSE = 1e-3
"""Log-probabilities of the same token: sums of float32 in another order, up to some 5 in size."""
WAITING = 12
"""Most requests at a time."""
MOST_STEPS = 5000
"""Of a chapter."""

COUNTS = "compared", "approximate", "sparse", "preempted", "short", "aborted", "resets", "steps"


class Soak:
    """Asks chapters of an engine, disturbs it, and compares its answers with stock vLLM's.

    Args:
        probe: on the engine.
        adapters: by name.
        known: stock's answers by index.

    Attributes:
        ties: what differs where two tokens were tied, a line each.
        compared: tokens that were equal.
        approximate: tokens that were not compared, decoded with less than the context.
        sparse: requests that went sparse.
        preempted: preemptions that were asked for.
        short: preemptions for want of blocks, by vLLM itself.
        aborted: requests.
        resets: of caches.
        steps: of the engine.
    """

    def __init__(self, probe, adapters, known):
        self.probe, self.known = probe, known
        self._adapters, self._weights = adapters, Weights(probe.llm)
        self._covered = probe.runtime.config.mode == "always"
        probe.runtime.before_step = self._watch
        # In a thread of its own it takes a number of steps that nobody can repeat.
        grammars = probe.scheduler.structured_output_manager
        assert grammars._use_async_grammar_compilation
        grammars._use_async_grammar_compilation = False
        self.ties = []
        self.compared = self.approximate = self.sparse = 0
        self.preempted = self.short = self.aborted = self.resets = self.steps = 0

    def __str__(self):
        return ", ".join(f"{value} {name}" for name, value in vars(self).items() if name in COUNTS)

    def assert_enough(self, requests):
        """Nothing of it was left out for want of an occasion."""
        assert self.compared > 4 * requests
        assert self.sparse > requests / 20
        assert self.preempted > requests / 10
        assert self.aborted > requests / 20
        assert self.resets > requests / 100

    def run(self, chapter):
        """Raises: AssertionError, with chapter, step and requests under way."""
        self.asking = Asking(self.probe.llm, self._adapters)
        self.chapter, self._dense, self._preempted, self._asked_for = chapter, {}, {}, 0
        self._draw = random.Random(chapter.number)
        self.probe.sparse.clear()
        self._start()
        waiting, step = list(chapter.asked), 0
        try:
            while waiting or self.asking.engine.has_unfinished_requests():
                room = WAITING - len(self.probe.scheduler.requests)
                for _ in range(min(room, len(waiting), self._draw.choice([0, 1, 4]))):
                    self._add_one_of(waiting)
                self._disturb()
                for index in self.asking.step():
                    self._compare(index)
                step += 1
                assert step < MOST_STEPS, "they do not come to their ends"
            greedy(self.probe.llm, [[1]], 1)
            self.probe.assert_all_back()
            self.probe.assert_nothing_known()
        except Exception as error:
            under_way = [
                f"{index} ({self.asking.asked[index].kind})"
                for index, answer in self.asking.answers.items()
                if not answer.ended
            ]
            error.add_note(f"chapter {chapter.number}, step {step}, under way {under_way}")
            raise
        self.steps += step
        self.sparse += len(self._dense)
        self.preempted += self._asked_for
        self.short += sum(self._preempted.values()) - self._asked_for

    def _start(self):
        """Nothing is left of the chapter before, whose weights were others."""
        self._weights.set(self.chapter.weights)
        if "resets" in self.chapter.kinds:
            llm = self.probe.llm
            assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def _add_one_of(self, waiting):
        """One session at a time: two that hold blocks and wait for more would wait for ever."""
        asked, answers = self.asking.asked, self.asking.answers
        under_way = {asked[index].kind for index, answer in answers.items() if not answer.ended}
        for place, one in enumerate(waiting):
            if one.kind != "session" or "session" not in under_way:
                self.asking.add(waiting.pop(place), self.known)
                return

    def _disturb(self):
        draw, kinds, scheduler = self._draw, self.chapter.kinds, self.probe.scheduler
        for index in sorted(self.asking.sessions):
            if draw.random() < 0.3:
                self.asking.add_part(index)
                if self.asking.answers[index].ended:
                    self._compare(index)
        if "aborts" in kinds and draw.random() < 0.05:
            running = [i for i, answer in self.asking.answers.items() if not answer.ended]
            if running:
                self.asking.abort(draw.choice(running))
                self.aborted += 1
        if "preemptions" in kinds and draw.random() < 0.1 and scheduler.running:
            self._preempt(draw.choice(scheduler.running))
        if "resets" in kinds and draw.random() < 0.03:
            self._reset()
        if draw.random() < 0.05:
            # What nobody uses is in the store alone.
            pool = self.probe.pool
            pool.evict_blocks({block.block_id for block in pool.blocks if not block.ref_cnt})

    def _preempt(self, request):
        """As vLLM does, between two steps: it may come back at once."""
        scheduler = self.probe.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._asked_for += 1

    def _reset(self):
        scheduler = self.probe.scheduler
        running = {request.request_id for request in scheduler.running}
        if self.probe.manager.req_to_blocks.keys() - running:
            # A session that waits for its next part keeps its blocks, with which vLLM cannot.
            return
        self.resets += 1
        every = self._draw.random() < 0.7
        self._asked_for += len(running) if every else 0
        self.probe.llm.reset_prefix_cache(
            reset_running_requests=every, reset_connector=self._draw.random() < 0.5
        )

    def _watch(self, runtime):
        """Before a forward: note what each request had answered when it went sparse."""
        for name, request in self.probe.scheduler.requests.items():
            self._preempted[name] = request.num_preemptions
        before = set(self.probe.sparse)
        self.probe(runtime)
        for name in self.probe.sparse - before:
            state = self.asking.engine.output_processor.request_states[name]
            index, child = int(state.external_req_id), state.request_index
            part = self.asking.answers[index].parts if index in self.asking.answers else 0
            tokens = self.probe.scheduler.requests[name].num_output_tokens
            self._dense[index, child] = (part, tokens)

    def _exact(self, index, number):
        """How many tokens of a part or of one of several answers must be stock's."""
        asked = self.asking.asked[index]
        child = number if asked.several > 1 else 0
        part = number if asked.kind == "session" else 0
        whole = len(self.asking.answers[index].tokens[number])
        if self._covered or (index, child) not in self._dense:
            return whole
        sparse_part, tokens = self._dense[index, child]
        return whole if part < sparse_part else tokens if part == sparse_part else 0

    def _compare(self, index):
        asked, ours, stock = self.asking.asked[index], self.asking.answers[index], self.known[index]
        what = f"request {index} ({asked.kind}, {len(self.asking.prompts[index])} tokens)"
        assert not ours.error, what
        for number, tokens in enumerate(ours.tokens):
            of = 0 if asked.several > 1 else number
            assert len(tokens) == len(stock.tokens[of]), what
            exact = self._exact(index, number)
            same = equal_start(tokens, stock.tokens[of])
            self.compared += min(same, exact)
            self.approximate += len(tokens) - exact
            if same < exact:
                ahead = stock.gaps[of][same]
                assert ahead < TIE, (
                    f"{what}: token {same} of {tokens}, stock has {stock.tokens[of]}"
                )
                self.ties.append(f"{what}: token {same}, {ahead} ahead")
                # A session goes on from what it has answered.
                return
        assert_close(ours.prompt_logprobs, stock.prompt_logprobs, what)


def equal_start(one, other):
    """How many tokens are equal before the first that differ."""
    pairs = zip(one, other, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(one))


def assert_close(ours, stock, what):
    for place, (one, other) in enumerate(zip(ours or [], stock or [], strict=True)):
        for token, entry in (other or {}).items():
            same = token in one and math.isclose(one[token].logprob, entry.logprob, abs_tol=CLOSE)
            assert same, f"{what}: place {place}: {one} where stock has {other}"
