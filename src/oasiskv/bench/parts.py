"""Where the time of a step goes on the device: kernels by what they are for."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_PARTS = {
    "scores": r"^_\w*(logits|scores)\w*_kernel",
    "plan": r"^_\w*plan\w*_kernel",
    "gather": r"^_gather\w*_kernel",
    "digest": r"^_(keys4|minmax|digest)\w*_kernel",
    "other": r"reshape_and_cache",
    "attention": r"flash|fmha|attention",
    "matrix products": r"nvjet|gemm|gemv|cublas|cutlass|splitk|matmul",
    "copies": r"^Mem(cpy|set)",
}
"""Part -> what the names of its kernels match, whatever the case; the first part that does counts.

FlashAttention's kernels are made with cutlass, and one that writes KV has flash in its name.
"""
_OTHERS = 5
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class Interval(NamedTuple):
    """A kernel or a copy on the device, times in microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class StepParts:
    """Time per step, in milliseconds, means over the steps that were profiled.

    Args:
        steps: that were profiled.
        step_ms: wall time, under the profiler.
        busy_ms: at least one kernel or copy ran.
        idle_ms: none ran: the device waited for the host.
        parts_ms: by what it was for; in sum more than ``busy_ms`` where streams overlap.
        others_ms: of part ``other`` the kernels that took longest, by name.
    """

    steps: int
    step_ms: float
    busy_ms: float
    idle_ms: float
    parts_ms: dict[str, float]
    others_ms: dict[str, float]


def profile_steps(step: Callable[[], object], steps: int) -> StepParts:
    """Profile ``steps`` calls of ``step``; without CUDA every part is 0."""
    on_gpu = torch.cuda.is_available()
    # What the host does is not traced beside a GPU: that would slow it down.
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        intervals = read_trace(path)
    return split(intervals, steps, 1000 * seconds / steps)


def read_trace(path: Path) -> list[Interval]:
    """What ran on the device, from a trace in Chrome's format as torch.profiler writes it."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Interval(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]


def split(intervals: Sequence[Interval], steps: int, step_ms: float) -> StepParts:
    """Sum up by part.

    Args:
        intervals: what ran on the device in all steps, in any order, on any stream.
        steps: how many.
        step_ms: wall time of one.
    """
    parts = dict.fromkeys(_PARTS, 0.0)
    others: defaultdict[str, float] = defaultdict(float)
    for name, start, end in intervals:
        part = part_of(name)
        share = (end - start) / 1000 / steps
        parts[part] += share
        if part == "other":
            others[name] += share
    busy = union_us(intervals) / 1000 / steps
    return StepParts(
        steps=steps,
        step_ms=step_ms,
        busy_ms=busy,
        idle_ms=max(0.0, step_ms - busy),
        parts_ms=parts,
        others_ms=dict(sorted(others.items(), key=lambda item: -item[1])[:_OTHERS]),
    )


def part_of(name: str) -> str:
    """The part that a kernel of this name is of."""
    found = (part for part, names in _PARTS.items() if re.search(names, name, re.IGNORECASE))
    return next(found, "other")


def union_us(intervals: Iterable[Interval]) -> float:
    """Time in which at least one of the intervals runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(intervals, key=lambda interval: interval.start_us):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
