"""Times of calls on a CPU or a CUDA device: medians and spread, cold caches, warm-up apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 2**28
"""Written before each call: several times the L2 cache of any GPU so far (H200: 50 MB)."""


@dataclass(frozen=True)
class Spread:
    """Times of repeated calls.

    Args:
        median_us: the middle one, in microseconds.
        low_us: a tenth of the calls took less.
        high_us: a tenth took more.
        repeats: calls that were timed.
    """

    median_us: float
    low_us: float
    high_us: float
    repeats: int

    @classmethod
    def of(cls, times_us: list[float]) -> Spread:
        """Of at least one time."""
        ordered = sorted(times_us)
        last = len(ordered) - 1
        low, middle, high = (ordered[round(last * share)] for share in (0.1, 0.5, 0.9))
        return cls(middle, low, high, len(ordered))


def time_calls(
    run: Callable[[], object], device: torch.device, repeats: int, *, graph: bool = False
) -> Spread:
    """Time ``run``, three calls of warm-up apart.

    On CUDA the L2 cache is overwritten before each call, which also keeps the device busy while the
    call is launched, and the time is that between two events around it.

    Args:
        run: what to time; without synchronisation if ``graph``.
        device: where it runs.
        repeats: calls to time.
        graph: CUDA only: capture the call in a graph first, so that what its launches cost the host
            is left out, as in an engine that replays graphs.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return Spread.of([_seconds(run) * 1e6 for _ in range(repeats)])
    call = captured(run) if graph else run
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(repeats):
        start, end = event(), event()
        flush.zero_()
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return Spread.of([start.elapsed_time(end) * 1e3 for start, end in pairs])


def event() -> torch.cuda.Event:
    """An event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """A call that replays ``run`` as a CUDA graph, and keeps what ``run`` works on."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()

    def replay(_keeps: Callable[[], object] = run) -> None:
        graph.replay()

    return replay
