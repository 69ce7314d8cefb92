"""Verification keeps the target's distribution: a chi-square test over a small Markov model.

SIGNIFICANCE is the chance that a correct rule is refused for a seed taken at random; the seed is
fixed, so a run either always passes or always fails.
"""

import pytest
import torch
from scipy.stats import chisquare

from oasiskv.drafts import verify as verify_module
from oasiskv.drafts.verify import Sampling, probabilities, verify

VOCAB = 8
DRAWS = 8_000
SIGNIFICANCE = 1e-3
START = 0


def markov_logits() -> torch.Tensor:
    """Logits ``[V, V]`` of the next token after each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))


def draw_pairs(table: torch.Tensor, num_drafts: int, sampling: Sampling) -> torch.Tensor:
    """Count the first two tokens after START over DRAWS runs, ``[V, V]``.

    Drafts are a fixed function of the last token, as from a deterministic source, and right often
    enough that both acceptance and rejection are common.
    """
    generator = sampling.generator()
    favourite = table.argmax(dim=-1).tolist()
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for _ in range(DRAWS):
        tokens = [START]
        while len(tokens) < 3:
            fed = tokens[-1:]
            for _ in range(num_drafts):
                fed.append(favourite[fed[-1]])
            tokens += verify(table[fed], fed[1:], sampling, generator)
        counts[tokens[1], tokens[2]] += 1
    return counts


def p_values(counts: torch.Tensor, table: torch.Tensor, sampling: Sampling) -> tuple[float, float]:
    """p-values of the first token, and of the second given the first."""
    target = torch.stack([probabilities(row, sampling) for row in table])
    first = counts.sum(dim=1)
    possible = target[START] > 0
    assert first[~possible].sum() == 0
    marginal = chisquare(first[possible], target[START][possible] * DRAWS).pvalue
    expected = first[:, None] * target
    cells = expected > 0
    assert counts[~cells].sum() == 0
    # Every first token that occurred fixes one sum, beside the total.
    lost = int((first > 0).sum()) - 1
    return marginal, chisquare(counts[cells], expected[cells], ddof=lost).pvalue


@pytest.mark.parametrize(
    ("num_drafts", "sampling"),
    [
        (0, Sampling(temperature=1.0, seed=10)),
        (1, Sampling(temperature=1.0, seed=11)),
        (2, Sampling(temperature=1.0, seed=12)),
        (3, Sampling(temperature=1.0, seed=13)),
        (2, Sampling(temperature=1.5, top_p=0.8, seed=14)),
    ],
)
def test_the_tokens_are_distributed_as_the_target_says(num_drafts, sampling):
    table = markov_logits()
    marginal, conditional = p_values(draw_pairs(table, num_drafts, sampling), table, sampling)
    assert marginal > SIGNIFICANCE
    assert conditional > SIGNIFICANCE


def test_the_test_refuses_a_rule_that_keeps_the_rejected_draft(monkeypatch):
    monkeypatch.setattr(verify_module, "_without", lambda target, draft: target)
    table, sampling = markov_logits(), Sampling(temperature=1.0, seed=15)
    marginal, conditional = p_values(draw_pairs(table, 2, sampling), table, sampling)
    assert marginal < SIGNIFICANCE
    assert conditional < SIGNIFICANCE
