"""Every op against its floor: the bytes that it must move over what the machine moves at best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from oasiskv.bench.interference import Interference, measure_interference
from oasiskv.bench.op_cases import CPU_SIZES, GPU_SIZES, Case, Sizes, make_cases
from oasiskv.bench.timing import Spread, time_calls
from oasiskv.errors import ConfigError, StateError

_COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
_REFERENCE_REPEATS = 5


@dataclass(frozen=True)
class OpTime:
    """Times of one form of one op.

    Args:
        name: of the op and its variant.
        form: ``kernel`` or ``reference``.
        shape: sizes.
        moved_bytes: bytes that it must move.
        floor_us: these over the measured speed of what they move over.
        share: floor over median: 1 is the floor.
        time: measured.
    """

    name: str
    form: str
    shape: str
    moved_bytes: int
    floor_us: float
    share: float
    time: Spread


@dataclass(frozen=True)
class OpsReport:
    """What ``measure_ops`` found.

    Args:
        device: name of the device.
        copy_gbps: read and written bytes of a copy within its memory, 10**9 a second.
        h2d_gbps: bytes copied from (pinned) host memory, 10**9 a second.
        d2h_gbps: bytes copied to (pinned) host memory, 10**9 a second.
        ops: times.
        interference: what gathers cost a main stream; none on a CPU or with another ``only``.
    """

    device: str
    copy_gbps: float
    h2d_gbps: float
    d2h_gbps: float
    ops: list[OpTime]
    interference: list[Interference]


def measure_ops(
    device: str, *, only: str = "", repeats: int = 50, sizes: Sizes | None = None
) -> OpsReport:
    """Time references, and on CUDA kernels, after checking each kernel against its reference.

    Args:
        device: ``cuda`` or ``cpu``; on ``cpu`` the references alone, at small sizes.
        only: time the ops whose name starts so; empty for all.
        repeats: calls of a kernel, or on a CPU of a reference, that are timed.
        sizes: other sizes than those of the device.

    Raises:
        ConfigError: the device is unknown or not there.
        StateError: a kernel differs from its reference; nothing wrong is timed.
    """
    if device not in _COPY_BYTES:
        raise ConfigError(f"device={device} is not known; cuda or cpu is needed")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a CUDA device and a CUDA build of torch; found none")
    where = torch.device(device)
    bandwidth = {
        "memory": 2 * _copy_speed(where, where, where, repeats),
        "h2d": _copy_speed(torch.device("cpu"), where, where, repeats),
        "d2h": _copy_speed(where, torch.device("cpu"), where, repeats),
    }
    ops: list[OpTime] = []
    for case in make_cases(sizes or (GPU_SIZES if device == "cuda" else CPU_SIZES), where):
        if case.name.startswith(only):
            ops.extend(_time_case(case, where, bandwidth[case.link], repeats))
    gathers = device == "cuda" and "gather".startswith(only)
    return OpsReport(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        copy_gbps=bandwidth["memory"] / 1e9,
        h2d_gbps=bandwidth["h2d"] / 1e9,
        d2h_gbps=bandwidth["d2h"] / 1e9,
        ops=ops,
        interference=measure_interference(repeats) if gathers else [],
    )


def _time_case(
    case: Case, device: torch.device, bytes_per_s: float, repeats: int
) -> Iterator[OpTime]:
    """The kernel's time, where there is a GPU and it is right, and the reference's."""
    reference = import_module(f"oasiskv.ops.{case.op}.reference")
    times = {}
    if device.type == "cuda":
        # Imported only here, since CPU users have no Triton.
        kernel = import_module(f"oasiskv.ops.{case.op}.triton")
        check_kernel(case, reference, kernel)
        times["kernel"] = time_calls(lambda: case.run(kernel, 1), device, repeats, graph=True)
        repeats = min(repeats, _REFERENCE_REPEATS)
    times["reference"] = time_calls(lambda: case.run(reference, 0), device, repeats)
    floor_us = case.moved_bytes / bytes_per_s * 1e6
    for form, time in times.items():
        share = floor_us / time.median_us
        yield OpTime(case.name, form, case.shape, case.moved_bytes, floor_us, share, time)


def check_kernel(case: Case, reference: ModuleType, kernel: ModuleType) -> None:
    """Run both forms once.

    Raises:
        StateError: their results differ.
    """
    case.run(reference, 0)
    case.run(kernel, 1)
    difference = case.difference()
    if difference:
        raise StateError(f"{case.name} is not timed, its kernel is wrong: {difference}")


def _copy_speed(
    source: torch.device, dest: torch.device, device: torch.device, repeats: int
) -> float:
    """Bytes a second of a plain copy, each byte counted once."""
    size = _COPY_BYTES[device.type]
    first, second = (
        torch.empty(
            size,
            dtype=torch.uint8,
            device=place,
            pin_memory=place.type == "cpu" and device.type == "cuda",
        )
        for place in (source, dest)
    )
    first.zero_()
    second.zero_()
    time = time_calls(lambda: second.copy_(first, non_blocking=True), device, min(repeats, 10))
    return size / time.median_us * 1e6
