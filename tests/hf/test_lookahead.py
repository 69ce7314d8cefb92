"""Which query predicts the next step, and what prediction, transition and hysteresis do."""

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.hf import Engine
from oasiskv.hf.prefill import prefill
from oasiskv.stores.host import HostStore
from tiny import prompt_of, stock_greedy, stock_llama, tiny_llama

CONFIG = OasisConfig(
    budget_tokens=64, hot_tokens=64, sink_tokens=16, window_tokens=16, cap_fraction=None
)
PROMPT = prompt_of(600)


class Replay:
    """Drafts that are always right: known tokens by position."""

    def __init__(self, tokens):
        self._tokens = tokens

    def propose(self, request_id, tokens, max_drafts):
        return self._tokens[len(tokens) : len(tokens) + max_drafts]

    def finish(self, request_id):
        pass


def forced_run(lookahead, drafts, hysteresis=2.0, draft_tokens=1):
    """Teacher-forced decode of 64 tokens with agreement measured at each step."""
    loaded = tiny_llama()
    config = CONFIG.model_copy(
        update={"lookahead": lookahead, "hysteresis": hysteresis, "draft_tokens": draft_tokens}
    )
    forced = prompt_of(64, seed=3)
    engine = Engine(
        loaded, config, HostStore(loaded.geometry, 60), drafts and drafts(forced), agreement_every=1
    )
    request = engine.submit("a", PROMPT, 64, forced=forced)
    for output in engine.stream():
        assert output.error is None
    return request


def right(forced):
    return Replay(PROMPT + forced)


def wrong(forced):
    return Replay([(token + 1) % 97 for token in PROMPT + forced])


def mean(values):
    return sum(values) / len(values)


def test_a_right_held_back_draft_predicts_better_than_the_stale_query():
    """Not exactly: its query was computed with the hot set of the step before."""
    held = mean(forced_run(LookaheadMode.HELD_BACK, right).stats.agreement)
    stale = mean(forced_run(LookaheadMode.LAST_ACCEPTED, None).stats.agreement)
    assert held > stale


def test_a_right_held_back_draft_predicts_exactly_once_all_is_resident():
    loaded = tiny_llama()
    config = CONFIG.model_copy(update={"hot_tokens": 768, "draft_tokens": 1, "threshold_tokens": 0})
    forced = prompt_of(64, seed=3)
    store = HostStore(loaded.geometry, 60)
    engine = Engine(loaded, config, store, right(forced), agreement_every=1)
    engine.submit("a", PROMPT, 64, forced=forced)
    for _ in engine.stream():
        pass
    agreement = engine.requests["a"].stats.agreement
    assert agreement
    assert min(agreement) > 0.999


def test_a_wrong_draft_falls_back_to_the_last_accepted_query():
    held = forced_run(LookaheadMode.HELD_BACK, wrong)
    stale = forced_run(LookaheadMode.LAST_ACCEPTED, None)
    assert held.stats.agreement == pytest.approx(stale.stats.agreement)


def test_paper_mode_accepts_no_draft_and_held_back_all_but_the_last():
    paper = forced_run(LookaheadMode.PAPER, right, draft_tokens=4)
    held = forced_run(LookaheadMode.HELD_BACK, right, draft_tokens=4)
    last = forced_run(LookaheadMode.LAST_ACCEPTED, right, draft_tokens=4)
    assert set(paper.stats.accepted) == {1}
    assert max(held.stats.accepted) == 4
    assert max(last.stats.accepted) == 5


def test_hysteresis_lowers_traffic():
    plain = forced_run(LookaheadMode.HELD_BACK, right, hysteresis=1.0).stats.traffic
    held = forced_run(LookaheadMode.HELD_BACK, right, hysteresis=2.0).stats.traffic
    assert sum(s.fetched for s in held) < sum(s.fetched for s in plain)


def test_the_transition_in_mid_decode_happens_past_the_threshold():
    loaded = tiny_llama()
    config = CONFIG.model_copy(update={"threshold_tokens": 620})
    engine = Engine(loaded, config, HostStore(loaded.geometry, 60))
    request = engine.submit("a", PROMPT, 60)
    while request.residents is None:
        engine.step()
        assert request.residents is not None or request.computed <= 620
    assert request.computed == 621


def test_below_the_threshold_a_request_stays_dense_and_exact():
    loaded = tiny_llama()
    engine = Engine(loaded, CONFIG, HostStore(loaded.geometry, 60))
    prompt = prompt_of(60)
    assert engine.generate([prompt], 20)[0] == stock_greedy(stock_llama(), prompt, 20)[0]
    assert not next(iter(engine.requests.values())).stats.traffic


def test_a_shared_prefill_gives_the_same_output():
    loaded = tiny_llama()
    outputs = []
    for shared in (None, prefill(loaded, PROMPT)):
        engine = Engine(loaded, CONFIG, HostStore(loaded.geometry, 60))
        request = engine.submit("a", PROMPT, 30, prefilled=shared)
        for _ in engine.stream():
            pass
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


def test_oracle_drafts_are_accepted():
    loaded = tiny_llama()
    config = CONFIG.model_copy(update={"hot_tokens": 768})
    known = Engine(loaded, OasisConfig(mode="dense")).generate([PROMPT], 32)[0]
    drafts = OracleDrafts({"a": known}, {"a": len(PROMPT)})
    engine = Engine(loaded, config, HostStore(loaded.geometry, 60), drafts)
    request = engine.submit("a", PROMPT, 32)
    for _ in engine.stream():
        pass
    assert request.output == known
    # Four drafts a step, the last one held back.
    assert request.stats.accepted[:-1] == [4] * (len(request.stats.accepted) - 1)


def test_an_observer_sees_what_is_wanted():
    loaded = tiny_llama()
    engine = Engine(loaded, CONFIG, HostStore(loaded.geometry, 60))
    seen = []
    engine.observer = seen.append
    request = engine.submit("a", PROMPT, 10)
    for _ in engine.stream():
        pass
    selections = [record.selection for record in seen if record.selection is not None]
    assert len(selections) == len(request.stats.traffic)
    for selection in selections:
        assert selection.wanted.shape == (2, 2, 4)
        assert torch.all(selection.wanted >= 1)
