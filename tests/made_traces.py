"""Traces that are made up, and plain-Python definitions of what a trace holds and costs."""

import numpy as np

from oasiskv.trace import Trace
from oasiskv.trace.builder import TraceBuilder
from oasiskv.trace.header import Recording

RECORDING = Recording(
    model="none",
    text="made up",
    context_tokens=1,
    digest="none",
    lookahead="last_accepted",
    drafts="none",
    hysteresis=1.0,
    hot_blocks=1,
    cap_blocks=1,
)
SINK, WINDOW, BLOCK = 1, 2, 16


def trace_of(sets, ends, layers, heads, budget):
    """A trace of ``sets[step][row]``, sets of blocks; ``ends[step]`` is past the last candidate."""
    builder = TraceBuilder(layers * heads)
    for step, (rows, end) in enumerate(zip(sets, ends, strict=True)):
        mask = np.zeros((layers * heads, end), dtype=bool)
        for row, blocks in enumerate(rows):
            mask[row, sorted(blocks)] = True
        builder.add((ends[-1] + WINDOW) * BLOCK + step, end, mask)
    return builder.build(
        layers=layers,
        kv_heads=heads,
        block_tokens=BLOCK,
        budget_blocks=budget,
        sink_blocks=SINK,
        window_blocks=WINDOW,
        recording=RECORDING,
    )


def drifting(layers=2, heads=2, steps=64, budget=6, candidates=80, seed=0) -> Trace:
    """Wanted sets of which some blocks leave each step, for blocks that are mostly not far off."""
    rng = np.random.default_rng(seed)
    sets = [[set(range(SINK, SINK + budget)) for _ in range(layers * heads)]]
    for step in range(1, steps):
        rows = []
        for row, blocks in enumerate(sets[-1]):
            kept = {b for b in blocks if rng.random() > 0.05 * (1 + row)}
            while len(kept) < budget:
                near = SINK + int(abs(rng.normal(step, 12))) % candidates
                kept.add(near)
            rows.append(kept)
        sets.append(rows)
    return trace_of(sets, [SINK + candidates] * steps, layers, heads, budget)


def sets_of(trace):
    """``[step][row]`` sets of blocks, by ``Trace.steps``."""
    flat = [step.wanted.reshape(trace.header.rows, -1) for step in trace.steps()]
    return [[{int(b) for b in row if b >= 0} for row in rows] for rows in flat]


def least_recently_wanted(stream, slots, warm_up):
    """Misses of one row's sets with so many slots: ``[step]`` numbers, from ``warm_up`` on."""
    held, last, misses = set(), {}, []
    for step, blocks in enumerate(stream):
        missing = blocks - held
        misses.append(len(missing))
        last.update(dict.fromkeys(blocks, step))
        held |= missing
        while len(held) > slots:
            held.remove(min(held - blocks, key=lambda block: (last[block], block)))
    return misses[warm_up:]
