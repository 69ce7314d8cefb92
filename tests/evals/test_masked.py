"""Decoding with a mask is decoding: it gives what the engines give, whatever is chosen."""

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.evals import methods
from oasiskv.evals.masked import MaskedDecoder
from oasiskv.evals.methods import METHODS
from oasiskv.evals.policies import Dense, ExactTop, Quest, RandomBlocks, Stale, WindowOnly
from oasiskv.hf import Engine
from oasiskv.hf.prefill import prefill
from tiny import prompt_of, tiny_llama

PROMPT, FORCED = prompt_of(300), prompt_of(70, seed=5)
CONFIG = OasisConfig(budget_tokens=64, hot_tokens=96, window_tokens=32)
POLICIES = {
    "dense": Dense(6),
    "exact": ExactTop(6),
    "quest": Quest(6),
    "stale": Stale(6),
    "window": WindowOnly(6),
    "random": RandomBlocks(6, 0),
}


@pytest.fixture(scope="module")
def prefilled():
    return prefill(tiny_llama(), PROMPT)


def decoded(prefilled, policy, pieces, measure_every=0):
    """Logits after the prompt's last token and each of ``FORCED``, decoded in pieces."""
    loaded = tiny_llama()
    decoder = MaskedDecoder(loaded, prefilled, policy, CONFIG, 400, measure_every)
    logits = [decoder.forward(PROMPT[len(prefilled.tokens) :], dense=True)[-1:]]
    left = list(FORCED)
    for piece in pieces:
        logits.append(decoder.forward(left[:piece]))
        left = left[piece:]
    assert not left
    return torch.cat(logits), decoder


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_all_at_once_or_one_by_one(prefilled, policy):
    at_once, _ = decoded(prefilled, policy, [70])
    one_by_one, _ = decoded(prefilled, policy, [1] * 70)
    assert torch.allclose(at_once, one_by_one, atol=1e-4)


def test_everything_chosen_is_dense(prefilled):
    logits, _ = decoded(prefilled, Dense(6), [70])
    # Without the mask.
    tokens = torch.tensor([PROMPT + FORCED])
    model = tiny_llama().model
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            expected = model(tokens).logits[0, len(PROMPT) - 1 :]
    finally:
        model.set_attn_implementation("oasiskv")
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("drafts", ["oasis-none", "oasis-oracle", "oasis-ngram", "oasis-paper"])
def test_an_engines_run_can_be_done_again(prefilled, monkeypatch, drafts):
    """What it held at each step, replayed, gives its logits."""
    monkeypatch.setattr(methods, "config_of", lambda budget: CONFIG)
    replayed = []

    def replay(loaded, prefilled, prompt, output, held, config):
        decoder = MaskedDecoder(loaded, prefilled, held, config, 400)
        first = decoder.forward(prompt[len(prefilled.tokens) :], dense=True)[-1:]
        replayed.append(torch.cat((first, decoder.forward(output[:-1]))))
        return torch.zeros(0), torch.zeros(0)

    monkeypatch.setattr(methods, "_measure", replay)
    arguments = (tiny_llama(), prefilled, PROMPT, FORCED, 5, 64, [])
    found = METHODS[drafts].decode(*arguments)
    [again] = replayed
    assert found.logits.shape == (75, tiny_llama().vocab_size)
    assert torch.allclose(found.logits, again, atol=1e-4)
    assert not torch.allclose(found.logits, METHODS["dense"].decode(*arguments).logits, atol=1e-2)
    assert found.moved_bytes > 0
    assert 0 < found.misses < 1


def test_the_oracle_is_the_lookahead_whose_drafts_are_right(prefilled, monkeypatch):
    monkeypatch.setattr(methods, "config_of", lambda budget: CONFIG)
    modes = {method.lookahead for method in METHODS.values()} - {None}
    assert modes == set(LookaheadMode)
    oracle, none = (
        METHODS[name].decode(tiny_llama(), prefilled, PROMPT, FORCED, 0, 64, [])
        for name in ("oasis-oracle", "oasis-none")
    )
    assert oracle.agreement > none.agreement


def test_recall_and_mass(prefilled):
    _, exact = decoded(prefilled, ExactTop(6), [70], 1)
    _, other = decoded(prefilled, RandomBlocks(6, 0), [70], 1)
    _, every = decoded(prefilled, Dense(6), [70], 1)
    assert exact.sums.rows == 70
    assert torch.equal(exact.sums.recall, torch.full((2, 2), 70.0))
    assert bool((other.sums.recall < 50).all())
    assert torch.allclose(every.sums.mass, torch.full((2, 2), 70.0))
    assert bool((other.sums.mass < exact.sums.mass).all())


def test_moves_are_what_was_not_chosen_before(prefilled):
    _, window = decoded(prefilled, WindowOnly(6), [70])
    # The window's end moves on by one block every 16 tokens, from 300 to 370: 5 times, in 2 layers
    # of 2 heads.
    assert window.sums.moved_tiles == 5 * 4
    assert window.sums.moved_rows == 69
    _, in_pieces = decoded(prefilled, WindowOnly(6), [1] * 70)
    assert in_pieces.sums.moved_tiles == window.sums.moved_tiles


def test_greedy_tokens_of_dense_are_the_engines(prefilled):
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"))
    [expected] = engine.generate([PROMPT], 20)
    found = METHODS["dense"].decode(tiny_llama(), prefilled, PROMPT, [], 20, 64, [])
    assert found.tokens == expected
