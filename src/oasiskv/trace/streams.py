"""One layer and KV head of a replay: a source's stream from another step on, for as long as asked.

Past its last step a source begins anew, after its warm-up. What was wanted there before is another
set than what was wanted last, so that a plain jump would miss much at once. So blocks change names:
both orders, of the source's blocks just before the step to go on with and of the names in the
stream so far, are from the longest not wanted to the last wanted, and the n-th block takes the n-th
name. What a hot set misses depends on that order alone: it goes on as it does in the source.
"""

import numpy as np

from oasiskv.trace.format import Ints, Mask, Trace
from oasiskv.trace.stats import WARM_UP


class Sources:
    """The streams of a trace, one layer and KV head at a time.

    Args:
        trace: the source.
    """

    def __init__(self, trace: Trace) -> None:
        sizes = trace.counts.reshape(-1)
        rows, steps = trace.header.rows, trace.header.steps
        row = np.repeat(np.tile(np.arange(rows), steps), sizes)
        by_row = np.argsort(row, kind="stable")
        self._step = np.repeat(np.repeat(np.arange(steps), rows), sizes)[by_row]
        self._block = trace.blocks[by_row] - trace.header.sink_blocks
        self._bounds = np.searchsorted(row[by_row], np.arange(rows + 1))
        self._shape = (steps, trace.candidates[1])

    def row(self, row: int) -> Mask:
        """Wanted sets of one row: bool ``[steps, candidates of the last step]``."""
        part = slice(self._bounds[row], self._bounds[row + 1])
        changed = np.zeros(self._shape, dtype=np.bool_)
        changed[self._step[part], self._block[part]] = True
        return np.logical_xor.accumulate(changed, axis=0)


def restart_of(steps: int) -> int:
    """The source's step that follows its last one: the first after its warm-up."""
    return steps // WARM_UP


def stream(source: Mask, start: int, steps: int) -> Mask:
    """The wanted sets of one row of a replay.

    Args:
        source: bool ``[source steps, blocks]`` of one row of the source, ``WARM_UP`` steps or more.
        start: source step to begin with.
        steps: steps wanted.

    Returns:
        bool ``[steps, blocks]``.
    """
    restart = restart_of(len(source))
    before, soon = _last_wanted(source[:restart]), source[restart:].argmax(axis=0)
    soon[~source[restart:].any(axis=0)] = len(source)
    # Blocks that were never wanted come first, the soonest to be wanted at their head: if a hot set
    # lacks any of them, it lacks those.
    oldest_first = np.lexsort((np.where(before < 0, soon, 0), before))
    names = np.arange(source.shape[1])
    last = np.full(source.shape[1], -1)
    out = np.empty((steps, source.shape[1]), dtype=np.bool_)
    done = 0
    while done < steps:
        part = source[start : start + steps - done]
        out[done : done + len(part), names] = part
        wanted = _last_wanted(part)
        last[names] = np.where(wanted < 0, last[names], wanted + done)
        names[oldest_first] = np.argsort(last, kind="stable")
        start = restart
        done += len(part)
    return out


def _last_wanted(wanted: Mask) -> Ints:
    """Per block the last step that wanted it: int64 ``[blocks]``, -1 for none."""
    last = len(wanted) - 1 - wanted[::-1].argmax(axis=0)
    return np.where(wanted.any(axis=0), last, -1)
