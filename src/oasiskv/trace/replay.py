"""Replays a trace at another shape: other layers and KV heads, a longer context, other steps.

Each target layer and KV head takes the stream of one of the source's. Each block of the source
becomes ``copies`` blocks of the target, which are wanted together and spread evenly over its
context, so that K, S and misses all grow alike: misses as a share of K at each S/K, and the steps
between two wants of a block, stay what they are.
"""

import random
from collections import Counter

import numpy as np

from oasiskv import __version__
from oasiskv.errors import TraceError
from oasiskv.trace.format import Ints, Mask, Trace
from oasiskv.trace.header import MAX_BODY_BYTES, MAX_STEPS, MAX_TILES, Header, Replay
from oasiskv.trace.stats import WARM_UP
from oasiskv.trace.streams import Sources, restart_of, stream

_MAX_STREAM = 2**30
"""Most steps times the source's candidate blocks, or times layers and KV heads."""


def replay(
    source: Trace,
    *,
    layers: int | None = None,
    kv_heads: int | None = None,
    context_tokens: int | None = None,
    steps: int | None = None,
    budget_tokens: int | None = None,
    seed: int = 0,
) -> Trace:
    """A trace of another shape from the streams of this one; what is None stays.

    Args:
        source: a trace.
        layers: of the replay; layer l takes the source's layer at the same depth.
        kv_heads: of each layer; the source's are dealt by ``seed``, each as often as any other.
        context_tokens: at the first step; at least the source's at its last step.
        steps: of the replay.
        budget_tokens: K: a whole multiple of the source's, at most as much as the context has
            grown by; None: the largest.
        seed: see ``kv_heads``.

    Raises:
        TraceError: the shape is not one that this source can take; says which are.
    """
    head = source.header
    layers, kv_heads = layers or head.layers, kv_heads or head.kv_heads
    steps = steps or head.steps
    if head.steps < WARM_UP:
        raise TraceError(f"a source of {head.steps} steps is too short: {WARM_UP} are needed")
    _check_size(source, layers * kv_heads, steps, context_tokens or 0)
    positions = _positions(source, context_tokens, steps)
    ends = positions // head.block_tokens - head.window_blocks
    candidates, least = int(ends[0]) - head.sink_blocks, source.candidates[1]
    if candidates < least:
        need = (least + head.sink_blocks + head.window_blocks) * head.block_tokens
        raise TraceError(
            f"tokens={positions[0]} is not legal: a replay stretches the context, so that the "
            f"source's {least} candidate blocks need at least {need}"
        )
    copies = _copies(head, budget_tokens, candidates // least)
    place = np.arange(least * copies) * candidates // (least * copies) + head.sink_blocks
    dealt = deal(head, layers, kv_heads, seed)
    counts, blocks = _changes(source, dealt, steps, place.reshape(least, copies))
    header = Header.of(
        written_by=f"oasiskv {__version__}",
        layers=layers,
        kv_heads=kv_heads,
        block_tokens=head.block_tokens,
        budget_blocks=head.budget_blocks * copies,
        sink_blocks=head.sink_blocks,
        window_blocks=head.window_blocks,
        steps=steps,
        changes=len(blocks),
        recording=head.recording,
        replay=Replay.of(
            layers=head.layers,
            kv_heads=head.kv_heads,
            budget_blocks=head.budget_blocks,
            steps=head.steps,
            seed=seed,
            copies=copies,
        ),
    )
    return Trace(header, positions, ends, counts, blocks)


def deal(head: Header, layers: int, kv_heads: int, seed: int) -> list[int]:
    """The source's row of each row of a replay, in order.

    Depth is kept: target layer l takes source layer floor(l * source layers / layers). Of that
    layer the KV heads are shuffled and dealt, and shuffled again when all are out.
    """
    rng = random.Random(seed)
    rows = []
    for layer in range(layers):
        first = layer * head.layers // layers * head.kv_heads
        hand: list[int] = []
        for _ in range(kv_heads):
            hand = hand or rng.sample(range(head.kv_heads), head.kv_heads)
            rows.append(first + hand.pop())
    return rows


def _check_size(source: Trace, rows: int, steps: int, tokens: int) -> None:
    """Refuse what would not fit a file, before anything of its size is made."""
    head, width = source.header, source.candidates[1]
    tiles = rows * max(width, tokens // head.block_tokens)
    stream_tiles = max(steps, head.steps) * max(width, rows)
    if tiles > MAX_TILES or steps > MAX_STEPS or stream_tiles > _MAX_STREAM:
        raise TraceError(
            f"a replay of {rows} layers x KV heads, {tokens or source.positions[-1]} tokens and "
            f"{steps} steps is too large: at most {MAX_STEPS} steps, {MAX_TILES} tiles, and "
            f"{_MAX_STREAM} steps x blocks, or x layers x KV heads"
        )


def _positions(source: Trace, first: int | None, steps: int) -> Ints:
    """Tokens computed at each step: grow as the source's do, over and over if it has fewer."""
    grown = np.diff(source.positions)
    if not len(grown):
        grown = np.ones(1, dtype=np.int64)
    start = int(source.positions[-1]) if first is None else first
    positions: Ints = start + np.concatenate(([0], np.resize(grown, steps - 1).cumsum()))
    return positions


def _copies(head: Header, budget_tokens: int | None, most: int) -> int:
    """Blocks that a block of the source becomes."""
    unit = head.budget_blocks * head.block_tokens
    if budget_tokens is None:
        return most
    copies, rest = divmod(budget_tokens, unit)
    if rest or not 1 <= copies <= most:
        raise TraceError(
            f"budget={budget_tokens} is not legal: with this context it must be a multiple of the "
            f"source's K, {unit} tokens, and at most {most * unit}"
        )
    return copies


def _changes(source: Trace, dealt: list[int], steps: int, place: Ints) -> tuple[Ints, Ints]:
    """``counts`` and ``blocks`` of the replay.

    A source row that is dealt n times begins at n even points of its time, so that its copies do
    not want the same at the same step.

    Args:
        source: the source.
        dealt: its row of each row of the replay.
        steps: of the replay.
        place: int64 ``[source blocks, copies]``, ascending: the blocks that each becomes.
    """
    sources = Sources(source)
    uses, used = Counter(dealt), Counter[int]()
    at: list[Ints] = []
    changed: list[Ints] = []
    restart = restart_of(source.header.steps)
    room = MAX_BODY_BYTES // 8
    for row in dealt:
        start = used[row] and restart + used[row] * (source.header.steps - restart) // uses[row]
        used[row] += 1
        step, block = _toggles(stream(sources.row(row), start, steps))
        room -= len(block) * place.shape[1]
        if room < 0:
            raise TraceError("the replay is too large to write: fewer steps, layers or heads")
        at.append(step)
        changed.append(block)
    sizes = np.array([np.bincount(step, minlength=steps) for step in at])
    counts = sizes.T * place.shape[1]
    # Rows are in order and each is by step and block already: a stable sort by step is enough.
    order = np.argsort(np.concatenate(at), kind="stable")
    return counts, place[np.concatenate(changed)[order]].reshape(-1)


def _toggles(wanted: Mask) -> tuple[Ints, Ints]:
    """Step and block of each change, by step and block."""
    changed = wanted.copy()
    changed[1:] ^= wanted[:-1]
    step, block = changed.nonzero()
    return step, block
