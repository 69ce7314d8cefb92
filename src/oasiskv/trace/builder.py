"""Makes a trace of wanted blocks as they come, step by step."""

from typing import Any

import numpy as np

from oasiskv import __version__
from oasiskv.errors import TraceError
from oasiskv.trace.format import Ints, Mask, Trace
from oasiskv.trace.header import Header


class TraceBuilder:
    """Collects the changes from each step to the next.

    Args:
        rows: layers × KV heads.
    """

    def __init__(self, rows: int) -> None:
        self._last: Mask = np.zeros((rows, 0), dtype=np.bool_)
        self._positions: list[int] = []
        self._ends: list[int] = []
        self._counts: list[Ints] = []
        self._blocks: list[Ints] = []

    def add(self, position: int, end: int, wanted: Mask) -> None:
        """One more step.

        Args:
            position: tokens computed.
            end: one past the last candidate block, not below that of the step before.
            wanted: bool ``[rows, end]``; kept, so not to be written to.
        """
        changed = wanted.copy()
        changed[:, : self._last.shape[1]] ^= self._last
        self._positions.append(position)
        self._ends.append(end)
        self._counts.append(changed.sum(axis=1))
        self._blocks.append(changed.nonzero()[1])
        self._last = wanted

    def build(self, **header: Any) -> Trace:  # noqa: ANN401 - the header's fields
        """The trace of all steps.

        Args:
            header: fields of ``Header`` but those that follow from the steps.

        Raises:
            TraceError: no step was added, or the steps contradict the header.
        """
        if not self._ends:
            raise TraceError(
                "no step wants a block: the context is too short to go sparse; give more --tokens, "
                "or a smaller --budget and --hot"
            )
        blocks = np.concatenate(self._blocks)
        described = Header.of(
            written_by=f"oasiskv {__version__}",
            steps=len(self._ends),
            changes=len(blocks),
            **header,
        )
        return Trace(
            described,
            np.array(self._positions),
            np.array(self._ends),
            np.stack(self._counts),
            blocks,
        )
