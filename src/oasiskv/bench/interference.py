"""What a gather from pinned memory costs the kernels that run beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from oasiskv.bench.timing import Spread, captured, event

_GATHERS = 12
"""Gathers beside a main stream, which take longer than all of it."""

PROGRAMS = (4, 8, 32)


@dataclass(frozen=True)
class Interference:
    """A main stream, alone and beside gathers.

    Args:
        main: what runs on it.
        programs: of the gather.
        alone: time of the main stream.
        beside: the same while tiles are gathered.
        slowdown: by which its median grows, 0.06 being 6 %.
        gather_alone_us: median time of a gather.
        gather_beside_us: the same, beside the main stream.
    """

    main: str
    programs: int
    alone: Spread
    beside: Spread
    slowdown: float
    gather_alone_us: float
    gather_beside_us: float


def measure_interference(repeats: int) -> list[Interference]:
    """Gather 4,096 tiles of 8 KiB beside other work, arms alternating. Needs CUDA.

    Args:
        repeats: times of each arm.
    """
    gathers = {programs: captured(_gathers(programs)) for programs in PROGRAMS}
    found = []
    for name, make in _MAINS.items():
        run = make()
        run()
        main = captured(run)
        found += [
            _beside(name, main, gather, programs, repeats) for programs, gather in gathers.items()
        ]
    return found


def _stream() -> Callable[[], object]:
    numbers = torch.zeros(2**29, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for _ in range(8):
            numbers.add_(1)

    return run


def _products(tokens: int, weights: int, rounds: int) -> Callable[[], object]:
    """Tokens times matrices of 4,096 x 28,672, which are larger than the cache together."""
    rows = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda")
    shape = (weights, 4096, 28672)
    matrices = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        for matrix in matrices.unbind() * rounds:
            rows @ matrix

    return run


_MAINS: dict[str, Callable[[], Callable[[], object]]] = {
    "one addition to each of 2**29 numbers": _stream,
    "matrix products of 16 tokens": partial(_products, 16, 6, 8),
    "matrix products of 16,384 tokens": partial(_products, 16384, 1, 1),
}


def _gathers(programs: int) -> Callable[[], None]:
    from oasiskv.ops.gather.triton import gather_rows

    shape = (512, 8, 16, 256)
    source = torch.randn(shape, dtype=torch.bfloat16).pin_memory()
    dest = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    take, put = (
        torch.stack([torch.randperm(512, device="cuda") for _ in range(8)])[None] for _ in range(2)
    )

    def run() -> None:
        for _ in range(_GATHERS):
            gather_rows(source, take, dest, put, programs=programs)

    run()
    return run


def _beside(
    name: str,
    main: Callable[[], object],
    gathers: Callable[[], object],
    programs: int,
    repeats: int,
) -> Interference:
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    alone, beside, gather_alone, gather_beside = [], [], [], []
    for _ in range(repeats):
        alone.append(_time(main))
        gather_alone.append(_time(gathers) / _GATHERS)
        with torch.cuda.stream(aside):
            start, end = event(), event()
            start.record()
            gathers()
            end.record()
        torch.cuda.current_stream().wait_event(start)
        beside.append(_time(main))
        gather_beside.append(start.elapsed_time(end) * 1e3 / _GATHERS)
    first, second = Spread.of(alone), Spread.of(beside)
    return Interference(
        main=name,
        programs=programs,
        alone=first,
        beside=second,
        slowdown=second.median_us / first.median_us - 1,
        gather_alone_us=median(gather_alone),
        gather_beside_us=median(gather_beside),
    )


def _time(run: Callable[[], object]) -> float:
    """Microseconds on the current stream; waits for all streams."""
    start, end = event(), event()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
