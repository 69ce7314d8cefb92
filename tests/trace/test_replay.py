"""Replays keep what a hot set misses and how blocks come back, whatever the shape."""

from collections import Counter

import numpy as np
import pytest

from made_traces import SINK, WINDOW, drifting, sets_of
from oasiskv.errors import TraceError
from oasiskv.trace import measure, read_trace, replay
from oasiskv.trace.names import BUILT_IN
from oasiskv.trace.replay import deal
from oasiskv.trace.stats import WARM_UP
from oasiskv.trace.streams import Sources, stream

SOURCE = drifting(layers=3, heads=2, steps=80)
CONTEXT = (SINK + SOURCE.candidates[1] + WINDOW) * SOURCE.header.block_tokens
"""Tokens at which the candidates are as many as the source's at its end."""


def means(trace):
    return np.array([share.mean for share in measure(trace).miss_shares()])


def reuse(trace):
    shares = measure(trace).reuse_shares()
    return np.array([share for name, share in shares.items() if name != "not before"])


def test_the_same_shape_is_the_source():
    again = replay(SOURCE, context_tokens=CONTEXT)
    rows = deal(SOURCE.header, 3, 2, 0)
    expected = [[sets[row] for row in rows] for sets in sets_of(SOURCE)]
    assert sets_of(again) == expected
    assert sorted(rows) == list(range(6))
    assert again.header.replay.copies == 1


@pytest.mark.parametrize(("tokens", "copies"), [(CONTEXT, 1), (3 * CONTEXT, 3), (4231, 3)])
def test_a_longer_context_keeps_misses_and_distances_exactly(tokens, copies):
    longer = replay(SOURCE, context_tokens=tokens)
    assert longer.header.replay.copies == copies
    assert longer.header.budget_blocks == copies * SOURCE.header.budget_blocks
    assert longer.positions[0] == tokens
    assert np.array_equal(means(longer), means(SOURCE))
    assert np.array_equal(reuse(longer), reuse(SOURCE))


def test_blocks_that_are_wanted_are_spread_over_all_of_the_context():
    longer = replay(SOURCE, context_tokens=10 * CONTEXT, budget_tokens=6 * 16)
    assert longer.header.budget_blocks == SOURCE.header.budget_blocks
    wanted = set().union(*(blocks for rows in sets_of(longer) for blocks in rows))
    source = set().union(*(blocks for rows in sets_of(SOURCE) for blocks in rows))
    candidates, width = longer.candidates[0], SOURCE.candidates[1]
    assert wanted == {SINK + (block - SINK) * candidates // width for block in source}
    assert np.array_equal(means(longer), means(SOURCE))


def test_every_source_head_is_dealt_as_often_as_its_layers_others():
    head = SOURCE.header
    for layers, heads in ((1, 1), (2, 2), (3, 2), (7, 5), (32, 8)):
        rows = deal(head, layers, heads, seed=1)
        for layer in range(layers):
            mine = rows[layer * heads : (layer + 1) * heads]
            depth = layer * head.layers // layers
            assert {row // head.kv_heads for row in mine} == {depth}
            uses = Counter(mine)
            assert max(uses.values()) - min(uses[depth * 2 + h] for h in range(2)) <= 1
    assert deal(head, 32, 8, 1) == deal(head, 32, 8, 1) != deal(head, 32, 8, 2)


def test_copies_of_one_source_head_are_not_alike():
    many = replay(SOURCE, kv_heads=8)
    rows = list(zip(*sets_of(many), strict=True))
    for one in range(len(rows)):
        for other in range(one):
            same = sum(a == b for a, b in zip(rows[one], rows[other], strict=True))
            assert same < len(rows[one]) / 2


def test_past_its_end_a_stream_goes_on_with_the_source_after_its_warm_up():
    sources = Sources(SOURCE)
    for row in range(SOURCE.header.rows):
        source = sources.row(row)
        steps, restart = len(source), len(source) // WARM_UP
        out = stream(source, 0, 2 * steps)
        assert np.array_equal(out[:steps], source)
        # The same sets under other names: as large, and changing by as much at every step.
        again, after = out[steps - 1 : 2 * steps - restart], source[restart - 1 :]
        assert np.array_equal(again.sum(1), after.sum(1))
        changes = [np.diff(sets.astype(int), axis=0) for sets in (again, after)]
        assert np.array_equal(abs(changes[0]).sum(1), abs(changes[1]).sum(1))


def test_a_stream_from_the_middle_covers_the_source_once():
    source = Sources(SOURCE).row(0)
    steps, restart = len(source), len(source) // WARM_UP
    start = restart + 7
    out = stream(source, start, steps)
    assert np.array_equal(out[: steps - start], source[start:])
    assert np.array_equal(out.sum(1), source[: len(out)].sum(1))


# Where each head of the source is used as often as any other, only time is new. Past its end a
# stream has the source's order of blocks by when they were last wanted, so a hot set misses the
# same, but for two things: the one step at the turn is counted once more than others, and a block
# that the source never wanted before may here have a name that was wanted long ago, so that the
# largest hot sets have it. Of 255 steps, each 5 to 20 % of K, that is below .001. A plain jump from
# the last step to one before misses up to .003 more (made up ones .012).
ONLY_TIME = [{"kv_heads": 9}, {"kv_heads": 3, "steps": 1000}]

# Else heads that miss more or less than others are dealt once more or less often: the mean over
# heads moves as that of a sample does. Heads of a layer differ by up to .1 of K.
RESAMPLED = [
    {"layers": 32, "kv_heads": 8, "context_tokens": 32768},
    {"layers": 60, "kv_heads": 4, "steps": 200},
]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [*((shape, 0.001) for shape in ONLY_TIME), *((shape, 0.006) for shape in RESAMPLED)],
    ids=str,
)
def test_misses_and_distances_of_shipped_traces_are_kept(name, shape, tolerance):
    source = read_trace(name)
    other = replay(source, **shape)
    assert np.abs(means(other) - means(source)).max() < tolerance
    reused = reuse(source)
    assert np.abs(reuse(other)[: len(reused)] - reused).max() < tolerance


@pytest.mark.parametrize("shape", [{"kv_heads": 6}, {"steps": 400}])
def test_misses_and_distances_of_made_up_traces_are_kept(shape):
    other = replay(SOURCE, **shape)
    assert other.header.steps == shape.get("steps", SOURCE.header.steps)
    # 80 steps: the turn counts three times as much as in 255.
    assert np.abs(means(other) - means(SOURCE)).max() < 0.003


def test_a_replay_of_a_replay():
    twice = replay(replay(SOURCE, kv_heads=4), kv_heads=4, context_tokens=4 * CONTEXT)
    assert twice.header.replay.kv_heads == 4
    assert twice.header.recording == SOURCE.header.recording
    assert np.abs(means(twice) - means(SOURCE)).max() < 0.003


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"context_tokens": CONTEXT - 1}, f"tokens={CONTEXT - 1} .* need at least {CONTEXT}$"),
        ({"budget_tokens": 6 * 16 + 16}, "multiple of the source's K, 96 tokens"),
        ({"budget_tokens": 2 * 6 * 16}, "at most 96"),
        ({"layers": 2**27}, "too large"),
        ({"steps": 2**62}, "too large"),
        ({"context_tokens": 2**40}, "too large"),
        ({"steps": 2**21}, "at most 1048576 steps"),
        ({"seed": -1}, "seed"),
    ],
)
def test_shapes_that_are_refused(shape, text):
    with pytest.raises(TraceError, match=text):
        replay(SOURCE, **shape)


def test_a_source_that_is_too_short():
    with pytest.raises(TraceError, match="a source of 3 steps is too short: 4"):
        replay(drifting(steps=3))
