"""Intervals from resampled groups."""

import numpy as np
import pytest

from oasiskv.evals.statistics import difference, estimate


def test_mean_of_groups_whatever_their_size():
    found = estimate({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.0]})
    assert (found.mean, found.groups) == (0.5, 2)
    assert (found.low, found.high) == (0.0, 1.0)


def test_nothing_has_no_mean():
    assert np.isnan(estimate({}).mean)


def test_nineteen_of_twenty_intervals_hold_the_mean():
    """95 %, of a percentile bootstrap of 40 groups somewhat less."""
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(300):
        groups = {str(i): [value] for i, value in enumerate(rng.exponential(1.0, 40))}
        found = estimate(groups, seed)
        inside += found.low <= 1.0 <= found.high
    assert 0.88 < inside / 300 < 0.98


def test_a_paired_difference_is_narrower_than_two_means():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 1, 30)
    ours = {str(i): [value] for i, value in enumerate(hard + 0.1)}
    theirs = {str(i): [value] for i, value in enumerate(hard)}
    found = difference(ours, theirs)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
    assert estimate(ours).high - estimate(ours).low > 0.5


def test_unpaired_groups_are_refused():
    with pytest.raises(ValueError, match="not paired"):
        difference({"a": [1.0]}, {"b": [1.0]})
