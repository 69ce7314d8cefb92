"""Means with intervals: a paired bootstrap over texts or questions, never over tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval.

    Args:
        mean: over the groups' members.
        low: of the interval.
        high: of it.
        groups: texts or questions.
    """

    mean: float
    low: float
    high: float
    groups: int


def estimate(values: Mapping[str, Sequence[float]], seed: int = 0) -> Estimate:
    """Mean of groups' means, and its percentile interval from resampled groups.

    Args:
        values: group -> measurements of it.
        seed: drives the resampling; equal group names draw alike, which pairs two estimates.
    """
    means = np.array([np.mean(values[group]) for group in sorted(values)])
    if not len(means):
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    picks = np.random.default_rng(seed).integers(0, len(means), (DRAWS, len(means)))
    low, high = np.percentile(means[picks].mean(1), [2.5, 97.5])
    return Estimate(float(means.mean()), float(low), float(high), len(means))


def difference(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], seed: int = 0
) -> Estimate:
    """``ours - theirs``, paired: each resample takes both of the same groups.

    Raises:
        ValueError: the groups differ.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"not paired: {sorted(ours.keys() ^ theirs.keys())[:5]} on one side only")
    return estimate(
        {group: [float(np.mean(ours[group]) - np.mean(theirs[group]))] for group in ours}, seed
    )
