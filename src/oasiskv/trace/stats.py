"""What a trace asks of a hot set: misses at each size, and how long ago blocks were last wanted."""

from dataclasses import dataclass

import numpy as np

from oasiskv.trace.format import Ints, Trace

RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Sizes of hot sets that are compared, S/K."""

WARM_UP = 4
"""The first of so many parts of the steps fills the hot sets and is not counted."""


@dataclass(frozen=True)
class MissShare:
    """Missing blocks as a share of the wanted ones.

    Args:
        mean: over steps, layers and KV heads.
        p95_steps: 95th percentile over steps, all layers and KV heads of a step together: what a
            link has to carry.
        p95_rows: the same over steps, layers and KV heads, each on its own: what a cap per layer
            and KV head cuts off.
    """

    mean: float
    p95_steps: float
    p95_rows: float


@dataclass(frozen=True, eq=False)
class TraceStats:
    """Counts over the steps after the warm-up.

    Args:
        ratios: S/K of each hot set.
        wanted: int64 ``[steps, rows]`` wanted blocks.
        misses: int64 ``[ratios, steps, rows]`` those of them that were in no slot.
        reuse: int64 ``[rows, bins]`` wanted blocks by steps since they were last wanted: bin 0 is 1
            step, bin i is 2**(i-1)+1 to 2**i steps, the last bin is not before in this trace.
    """

    ratios: tuple[float, ...]
    wanted: Ints
    misses: Ints
    reuse: Ints

    def miss_shares(self) -> list[MissShare]:
        """One for each of ``ratios``."""
        by_step = self.misses.sum(axis=2) / np.maximum(1, self.wanted.sum(axis=1))
        by_row = self.misses / np.maximum(1, self.wanted)
        return [
            MissShare(
                float(misses.sum() / max(1, self.wanted.sum())),
                float(np.percentile(steps, 95)),
                float(np.percentile(rows, 95)),
            )
            for misses, steps, rows in zip(self.misses, by_step, by_row, strict=True)
        ]

    def reuse_shares(self) -> dict[str, float]:
        """Distance in steps -> share of all wanted blocks."""
        counts = self.reuse.sum(axis=0)
        return dict(
            zip(bin_names(len(counts)), (counts / max(1, counts.sum())).tolist(), strict=True)
        )


def bin_names(bins: int) -> list[str]:
    """Distances, in steps, of each bin of ``TraceStats.reuse``."""
    names = ["1", "2"] + [f"{2 ** (i - 1) + 1}-{2**i}" for i in range(2, bins)]
    return [*names[: bins - 1], "not before"]


def measure(trace: Trace, ratios: tuple[float, ...] = RATIOS) -> TraceStats:
    """Run hot sets of several sizes over a trace.

    Each layer and KV head has S slots. What is missing is fetched at once, without a cap, and
    replaces the blocks that were least recently wanted; among equally old ones the lowest. Slots
    start empty.

    Args:
        trace: what is wanted.
        ratios: S/K, each at least 1.

    Returns:
        Counts of the steps after the warm-up.
    """
    head, width = trace.header, int(trace.ends[-1])
    slots = [round(ratio * head.budget_blocks) for ratio in ratios]
    # Blocks that leave the hot set first have the lowest keys; never wanted ones are below 0.
    block = np.arange(width)
    keys = np.full((head.rows, width), -1, dtype=np.int64)
    bins = max(1, head.steps - 1).bit_length() + 2
    reuse = np.zeros((head.rows, bins), dtype=np.int64)
    wanted, misses = [], []
    for step, mask in enumerate(trace.masks()):
        if step >= head.steps // WARM_UP:
            row, place = mask.nonzero()
            key = keys[row, place]
            wanted.append(mask.sum(axis=1))
            # Sorted once: several partitions of all keys take longer.
            ordered = np.sort(keys, axis=1)
            missing = [key < _oldest(ordered, size)[row] for size in slots]
            misses.append([np.bincount(row[m], minlength=head.rows) for m in missing])
            bin_of = np.where(key < 0, bins - 1, _bins(step - key // width))
            found = np.bincount(row * bins + bin_of, minlength=reuse.size)
            reuse += found.reshape(reuse.shape)
        np.copyto(keys, step * width + block, where=mask)
    return TraceStats(ratios, np.array(wanted), np.array(misses).swapaxes(0, 1), reuse)


def _oldest(ordered: Ints, slots: int) -> Ints:
    """Per row the lowest key that is in a hot set of so many slots: int64 ``[rows]``.

    Args:
        ordered: int64 ``[rows, blocks]``, keys in ascending order.
        slots: S.
    """
    width = ordered.shape[1]
    return np.maximum(0, ordered[:, max(0, width - slots)])


def _bins(distances: Ints) -> Ints:
    """1 -> 0, 2 -> 1, 3 and 4 -> 2, 5 to 8 -> 3 and so on."""
    # frexp(n).exponent of n - 1/2 counts the bits of n - 1, exactly for all steps there can be.
    exponents: Ints = np.frexp(np.maximum(1, distances) - 0.5)[1].astype(np.int64)
    return exponents
