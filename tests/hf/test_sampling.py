"""Sampled output keeps the target's distribution while the last draft is held back."""

import pytest
import torch

from chi_square import p_value
from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.verify import Sampling
from oasiskv.hf import Engine
from oasiskv.stores.host import HostStore
from tiny import VOCAB, prompt_of, tiny_llama

DRAWS = 2400
PROMPT = prompt_of(40)
CONFIG = OasisConfig(
    budget_tokens=32, hot_tokens=64, sink_tokens=16, window_tokens=16, threshold_tokens=0
)
SIGNIFICANCE = 1e-3
"""Seeds are fixed: a right engine passes or fails for ever, and wrong ones fall far below."""


class LikelyDrafts:
    """Proposes what the target itself finds likely, so that drafts are often, not always, right."""

    def __init__(self, table):
        self._table = table

    def propose(self, request_id, tokens, max_drafts):
        drafts = []
        for _ in range(max_drafts):
            drafts.append(self._table[[*tokens, *drafts][-1]])
        return drafts

    def finish(self, request_id):
        pass


def exact_distribution(loaded, prompt) -> torch.Tensor:
    """P(second new token = j, first = i), ``[vocabulary, vocabulary]``, by dense attention."""
    engine = Engine(loaded, OasisConfig(mode="dense"))
    rows = {}
    engine.observer = lambda record: rows.setdefault(record.request.request_id, []).append(
        record.logits[0]
    )
    for token in range(VOCAB):
        engine.submit(str(token), prompt, 2, forced=[token, 0])
    for _ in engine.stream():
        pass
    first = rows["0"][0].double().softmax(-1)
    return first[:, None] * torch.stack(
        [rows[str(t)][1].double().softmax(-1) for t in range(VOCAB)]
    )


def sampled(loaded, prompt, drafts, lookahead) -> torch.Tensor:
    """Counts ``[vocabulary, vocabulary]`` of the first two new tokens over all draws."""
    counts = torch.zeros(VOCAB, VOCAB)
    config = CONFIG.model_copy(update={"lookahead": lookahead, "draft_tokens": 3})
    for batch in range(0, DRAWS, 150):
        engine = Engine(loaded, config, store=HostStore(loaded.geometry, 900), drafts=drafts)
        requests = [
            engine.submit(str(seed), prompt, 4, Sampling(temperature=1.0, seed=seed))
            for seed in range(batch, batch + 150)
        ]
        for output in engine.stream():
            assert output.error is None
        for request in requests:
            counts[request.output[0], request.output[1]] += 1
    return counts


@pytest.fixture(scope="module")
def distribution():
    return exact_distribution(tiny_llama(), PROMPT)


@pytest.mark.parametrize("lookahead", list(LookaheadMode))
def test_two_tokens_at_temperature_1_follow_the_target(distribution, lookahead):
    table = distribution.argmax(-1).tolist()
    counts = sampled(tiny_llama(), PROMPT, LikelyDrafts(table), lookahead)
    assert int(counts.sum()) == DRAWS
    assert p_value(counts, distribution) > SIGNIFICANCE


def test_the_chi_square_sees_a_held_draft_that_is_accepted(distribution, monkeypatch):
    """Taking the held-back draft instead of a sample, one time in five, is noticed."""
    from oasiskv.hf import engine as module

    calls = iter(range(10**9))
    right = module.verify

    def wrong(logits, drafts, sampling, generator):
        tokens = right(logits, drafts, sampling, generator)
        return [*tokens[:-1], 5] if next(calls) % 5 == 0 else tokens

    monkeypatch.setattr(module, "verify", wrong)
    table = distribution.argmax(-1).tolist()
    counts = sampled(tiny_llama(), PROMPT, LikelyDrafts(table), LookaheadMode.HELD_BACK)
    assert p_value(counts, distribution) < SIGNIFICANCE


def test_a_seed_repeats_its_output_whatever_runs_beside_it():
    loaded = tiny_llama()
    outputs = []
    for others in (0, 3):
        engine = Engine(loaded, CONFIG, store=HostStore(loaded.geometry, 100))
        request = engine.submit("a", PROMPT, 12, Sampling(temperature=1.0, seed=7))
        for other in range(others):
            engine.submit(str(other), prompt_of(30 + other), 12, Sampling(temperature=1.0))
        for _ in engine.stream():
            pass
        outputs.append(request.output)
    assert outputs[0] == outputs[1]
