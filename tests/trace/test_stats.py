"""Misses and reuse distances against plain loops over sets."""

from collections import Counter

import numpy as np
import pytest

from made_traces import SINK, drifting, least_recently_wanted, sets_of, trace_of
from oasiskv.trace.stats import RATIOS, bin_names, measure

TRACES = {
    "drifting": drifting(),
    "few candidates": drifting(candidates=9, budget=6, steps=31),
    "one row": drifting(layers=1, heads=1, steps=9, budget=1),
    "one step": drifting(steps=1),
}


@pytest.mark.parametrize("name", TRACES)
def test_misses_are_those_of_a_hot_set_that_evicts_the_least_recently_wanted(name):
    trace = TRACES[name]
    stats, sets = measure(trace), sets_of(trace)
    for ratio, misses in zip(RATIOS, stats.misses, strict=True):
        slots = round(ratio * trace.header.budget_blocks)
        for row in range(trace.header.rows):
            stream = [rows[row] for rows in sets]
            expected = least_recently_wanted(stream, slots, trace.header.steps // 4)
            assert misses[:, row].tolist() == expected


@pytest.mark.parametrize("name", TRACES)
def test_reuse_counts_steps_since_a_block_was_last_wanted(name):
    trace = TRACES[name]
    stats, sets = measure(trace), sets_of(trace)
    names = bin_names(stats.reuse.shape[1])
    for row in range(trace.header.rows):
        found, last = Counter(), {}
        for step, rows in enumerate(sets):
            for block in rows[row]:
                if step >= trace.header.steps // 4:
                    found[_name(step - last[block]) if block in last else "not before"] += 1
                last[block] = step
        counts = dict(zip(names, stats.reuse[row].tolist(), strict=True))
        assert {name: count for name, count in counts.items() if count} == found


def _name(distance):
    low, high = 1, 1
    while distance > high:
        low, high = high + 1, high * 2
    return str(low) if low == high else f"{low}-{high}"


def test_shares_are_of_all_wanted_blocks():
    # Two rows, K = 2: the first wants the same always, the second another block each step.
    sets = [[{1, 2}, {2 + step, 3 + step}] for step in range(8)]
    trace = trace_of(sets, [SINK + 20] * 8, 1, 2, 2)
    share = measure(trace, (1.0,)).miss_shares()[0]
    assert share.mean == pytest.approx(0.25)
    assert share.p95_steps == pytest.approx(0.25)
    assert share.p95_rows == pytest.approx(0.5)
    assert measure(trace).reuse_shares()["1"] == pytest.approx(0.75)
    assert sum(measure(trace).reuse_shares().values()) == pytest.approx(1)


def test_a_larger_hot_set_never_misses_more():
    misses = measure(drifting(steps=200)).misses.sum(axis=(1, 2))
    assert np.all(np.diff(misses) <= 0)
    assert misses[0] > misses[-1] > 0
