"""Intervals from resampled groups."""

import numpy as np
import pytest
from scipy.stats import binomtest

from oasiskv.evals.statistics import SHARE, difference, estimate


def groups_of(values):
    return {str(i): [value] for i, value in enumerate(values)}


def test_mean_of_groups_whatever_their_size():
    found = estimate({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.0]}, bounds=SHARE)
    assert (found.mean, found.groups) == (0.5, 2)
    assert (found.low, found.high) == SHARE


def test_nothing_has_no_mean_and_one_no_interval():
    assert np.isnan(estimate({}).mean)
    one = estimate({"a": [0.25]})
    assert one.mean == 0.25
    assert np.isnan([one.low, one.high]).all()


@pytest.mark.parametrize("count", [2, 4, 12, 40])
def test_nineteen_of_twenty_intervals_hold_the_mean(count):
    """As an interval of Student's does; without the correction it is 40 % of them with two."""
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(400):
        found = estimate(groups_of(rng.normal(1.0, 2.0, count)), seed)
        inside += found.low <= 1.0 <= found.high
    assert 0.92 < inside / 400 < 0.98


@pytest.mark.parametrize("count", [2, 4, 12, 40])
@pytest.mark.parametrize("value", [0, 1])
def test_all_alike_still_has_the_width_of_what_was_not_seen(count, value):
    found = estimate(groups_of([float(value)] * count), bounds=SHARE)
    exact = binomtest(value * count, count).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


def test_all_alike_without_bounds_has_no_width():
    found = estimate(groups_of([3.0] * 5))
    assert (found.low, found.high) == (3.0, 3.0)


def test_an_interval_of_shares_ends_where_shares_do():
    found = estimate(groups_of([1.0, 1.0, 1.0, 0.5]), bounds=SHARE)
    assert found.high == 1
    assert 0 < found.low < 0.7


def test_a_paired_difference_is_narrower_than_two_means():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 1, 30)
    noise = rng.normal(0.1, 0.01, 30)
    found = difference(groups_of(hard + noise), groups_of(hard))
    assert found.low == pytest.approx(0.1, abs=0.01)
    assert found.high == pytest.approx(0.1, abs=0.01)
    wide = estimate(groups_of(hard))
    assert wide.high - wide.low > 0.5


def test_unpaired_groups_are_refused():
    with pytest.raises(ValueError, match="not paired"):
        difference({"a": [1.0]}, {"b": [1.0]})
