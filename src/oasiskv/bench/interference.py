"""What a gather from pinned memory costs the kernels that run beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from oasiskv.bench.timing import Spread, captured, event

_WEIGHTS, _ROUNDS, _GATHERS = 6, 8, 8
"""Matrices of the main stream, larger than the cache together; how often each is read; gathers
beside, which take longer than all of it."""

PROGRAMS = (8, 16, 32)


@dataclass(frozen=True)
class Interference:
    """A main stream bound by memory, alone and beside gathers.

    Args:
        programs: of the gather.
        alone: time of the main stream.
        beside: the same while tiles are gathered.
        slowdown: by which its median grows, 0.06 being 6 %.
        gather_alone_us: median time of a gather.
        gather_beside_us: the same, beside the main stream.
    """

    programs: int
    alone: Spread
    beside: Spread
    slowdown: float
    gather_alone_us: float
    gather_beside_us: float


def measure_interference(repeats: int) -> list[Interference]:
    """Multiply 16 tokens by matrices of 4,096 x 28,672 in bf16, as a decode step does, and gather
    4,096 tiles of 8 KiB on another stream. Arms alternate. Needs CUDA.

    Args:
        repeats: times of each arm.
    """
    device = torch.device("cuda")
    tokens = torch.randn(16, 4096, dtype=torch.bfloat16, device=device)
    shape = (_WEIGHTS, 4096, 28672)
    weights = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        for _ in range(_ROUNDS):
            for weight in weights:
                tokens @ weight

    multiply()
    main = captured(multiply)
    return [_beside(main, captured(_gathers(programs)), programs, repeats) for programs in PROGRAMS]


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
    main: Callable[[], object], gathers: Callable[[], object], programs: int, repeats: int
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
