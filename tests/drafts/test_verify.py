import math

import pytest
import torch

from oasiskv.drafts.verify import Sampling, probabilities, verify
from oasiskv.errors import ConfigError, ModelError, StateError

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0)


def logits_for(tokens, vocab_size=32):
    """Rows whose largest logits are at ``tokens``."""
    rows = torch.zeros(len(tokens), vocab_size)
    rows[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return rows


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_accepts_up_to_the_first_difference(count, dtype):
    target = list(range(count + 1))
    logits = logits_for(target).to(dtype)
    assert verify(logits, target[:count], GREEDY, None) == target
    for wrong in range(count):
        drafts = [*target[:wrong], 31, *target[wrong + 1 : count]]
        assert verify(logits, drafts, GREEDY, None) == target[: wrong + 1]


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert verify(torch.zeros(2, 4), [0], GREEDY, None) == [0, 0]


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_a_certain_draft_is_never_rejected_and_an_impossible_one_always(count):
    target = list(range(count + 1))
    logits = torch.full((count + 1, 32), -math.inf)
    logits[torch.arange(count + 1), torch.tensor(target)] = 3.0
    generator = SAMPLED.generator()
    for _ in range(50):
        assert verify(logits, target[:count], SAMPLED, generator) == target
        assert verify(logits, [31] * count, SAMPLED, generator) == [0]


def test_almost_certain_drafts_leave_something_to_draw():
    logits = torch.tensor([[0.0, 36.0, -math.inf], [0.0, 0.0, 0.0]], dtype=torch.float64)
    generator = SAMPLED.generator()
    outcomes = {verify(logits, [1], SAMPLED, generator)[0] for _ in range(200)}
    assert outcomes == {1}
    # The draft has about 2e-16: rejected, and what is left is not renormalised to NaN.
    assert verify(logits, [0], SAMPLED, generator) == [1]


def test_the_seed_decides():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)

    def runs(seed):
        sampling = Sampling(temperature=1.0, seed=seed)
        generator = sampling.generator()
        return [verify(logits, [1, 2, 3], sampling, generator) for _ in range(20)]

    assert runs(1) == runs(1)
    assert runs(1) != runs(2)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
    logits = torch.tensor([1.0, 2.0, -math.inf, 0.5])
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    result = probabilities(logits, Sampling(temperature=temperature))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-308])
def test_no_temperature_is_one_hot(temperature):
    result = probabilities(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature=temperature))
    assert result.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, [0, 1, 2, 3]), (0.76, [0, 1, 2]), (0.74, [1, 2]), (0.5, [1]), (0.4, [1]), (1e-9, [1])],
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    # Powers of two, so that the masses .125 .5 .25 .125 are exact.
    mass = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[kept] = mass[kept] / mass[kept].sum()
    result = probabilities(mass.log(), Sampling(temperature=1.0, top_p=top_p))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_nucleus_takes_the_lowest_ids_of_a_tie():
    result = probabilities(torch.zeros(64), Sampling(temperature=1.0, top_p=0.1))
    assert torch.nonzero(result).flatten().tolist() == list(range(7))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.0, top_p=0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_refuses_logits_that_are_not_finite(sampling, value):
    logits = torch.zeros(3, 8)
    logits[2, 5] = value
    # The first draft would be rejected, so that the broken row is not needed: still an error.
    with pytest.raises(ModelError, match=r"row\(s\) \[2\]"):
        verify(logits, [3, 3], sampling, sampling.generator())
    with pytest.raises(ModelError):
        probabilities(logits[2], sampling)
    with pytest.raises(ModelError):
        probabilities(torch.full((8,), -math.inf), sampling)


@pytest.mark.parametrize(
    ("shape", "drafts", "message"),
    [
        ((2, 8), [], "needed is one row more"),
        ((2, 8), [1, 2], "needed is one row more"),
        ((8,), [], "needed is one row more"),
        ((2, 8), [-1], "from 0 to 7"),
        ((2, 8), [8], "from 0 to 7"),
    ],
)
def test_refuses_what_does_not_match(shape, drafts, message):
    with pytest.raises(StateError, match=message):
        verify(torch.zeros(shape), drafts, GREEDY, None)


def test_sampling_needs_a_generator():
    with pytest.raises(StateError, match="without a generator"):
        verify(torch.zeros(1, 8), [], SAMPLED, None)
    assert GREEDY.generator() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("temperature", "hot"),
        ("top_p", None),
        ("seed", 1.5),
    ],
)
def test_refuses_impossible_sampling(name, value):
    with pytest.raises(ConfigError, match=rf"{name} = {value!r}: needed is"):
        Sampling(**{name: value})
