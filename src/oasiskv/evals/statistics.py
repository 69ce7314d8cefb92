"""Means with intervals: a paired bootstrap over texts or questions, never over tokens.

The percentile interval of few groups is too narrow: of two it can be no wider than the two. It is
widened, about its mean, by ``sqrt(n / (n - 1)) * t / z``, the 97.5 % points of Student's t with
``n - 1`` degrees of freedom and of the normal distribution, as an interval of a mean is (the
correction behind "expanded percentile intervals", Hesterberg, What Teachers Should Know About the
Bootstrap, https://arxiv.org/abs/1411.5279).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np

DRAWS = 2000
OUTSIDE = 0.025
"""Probability on each side of an interval."""

SHARE = (0.0, 1.0)
"""Bounds of a score or a share."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval.

    Args:
        mean: over the groups' members.
        low: of the interval; NaN where one group, or none, gives none.
        high: of it.
        groups: texts or questions.
    """

    mean: float
    low: float
    high: float
    groups: int


def estimate(
    values: Mapping[str, Sequence[float]],
    seed: int = 0,
    bounds: tuple[float, float] = (-inf, inf),
) -> Estimate:
    """Mean of groups' means, and its interval from resampled groups.

    Args:
        values: group -> measurements of it.
        seed: drives the resampling; equal group names draw alike, which pairs two estimates.
        bounds: what a group's mean can be at all; the interval ends there. Where all groups gave
            the same, resampling says nothing. With finite bounds the interval then reaches as far
            as something that ``n`` groups miss in 2.5 % of cases could take the mean, which for
            ``n`` right answers of ``n`` is Clopper and Pearson's.
    """
    # With the other packages that only evaluation needs.
    from scipy.stats import norm, t

    means = np.array([np.mean(values[group]) for group in sorted(values)])
    count = len(means)
    if count < 2:
        return Estimate(float(means[0]) if count else nan, nan, nan, count)
    mean = float(means.mean())
    low, high = bounds
    if np.ptp(means) == 0:
        unseen = 1 - OUTSIDE ** (1 / count)
        if np.isfinite(bounds).all():
            ends = mean + unseen * (low - mean), mean + unseen * (high - mean)
        else:
            ends = mean, mean
        return Estimate(mean, *ends, count)
    picks = np.random.default_rng(seed).integers(0, count, (DRAWS, count))
    found = np.percentile(means[picks].mean(1), [100 * OUTSIDE, 100 * (1 - OUTSIDE)])
    wider = sqrt(count / (count - 1)) * t.isf(OUTSIDE, count - 1) / norm.isf(OUTSIDE)
    ends = mean + wider * (found - mean)
    return Estimate(mean, max(low, float(ends[0])), min(high, float(ends[1])), count)


def difference(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    seed: int = 0,
    bounds: tuple[float, float] = (-inf, inf),
) -> Estimate:
    """``ours - theirs``, paired: each resample takes both of the same groups.

    Args:
        ours: group -> measurements of it.
        theirs: the same groups.
        seed: drives the resampling.
        bounds: of the difference.

    Raises:
        ValueError: the groups differ.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"not paired: {sorted(ours.keys() ^ theirs.keys())[:5]} on one side only")
    return estimate(
        {group: [float(np.mean(ours[group]) - np.mean(theirs[group]))] for group in ours},
        seed,
        bounds,
    )
