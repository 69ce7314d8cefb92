"""What was wanted, missed and fetched so far, of all requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass
class Traffic:
    """Totals since the start. A tile is one block of one layer and KV head.

    Args:
        wanted_tiles: that steps wanted.
        missed_tiles: of these, those that were in no slot, before the cap.
        fetched_tiles: that swap plans moved from the store to slots.
        fetched_bytes: of these.
        cap_bytes: most that the same steps could have fetched.
        compared_tiles: wanted by a step's own query, where that was compared with the prediction.
        agreeing_tiles: of these, those that had been predicted.
    """

    wanted_tiles: int = 0
    missed_tiles: int = 0
    fetched_tiles: int = 0
    fetched_bytes: int = 0
    cap_bytes: int = 0
    compared_tiles: int = 0
    agreeing_tiles: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> list[int]:
        return [getattr(self, field.name) for field in fields(self)]


class DeviceCounts:
    """Counts that the device keeps, read without waiting for it: they may be some steps old.

    Args:
        counts: int64 ``[n]``, on any device.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts
        self._latest = [0] * len(counts)
        self._host = torch.zeros(len(counts), dtype=torch.int64, pin_memory=counts.is_cuda)
        self._copied: torch.cuda.Event | None = None

    def request(self) -> None:
        """Ask for the counts, in the order of the current stream, unless an answer is due."""
        if self._counts.is_cuda and self._copied is None:
            self._host.copy_(self._counts, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def latest(self) -> list[int]:
        """The counts as of the last answer; off CUDA as they are."""
        if not self._counts.is_cuda:
            return [int(count) for count in self._counts]
        if self._copied is not None and self._copied.query():  # type: ignore[no-untyped-call]
            self._latest, self._copied = self._host.tolist(), None
        return self._latest
