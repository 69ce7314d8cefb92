"""``bench ops``: what is timed, against what, and that no wrong kernel is."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from oasiskv.bench.op_cases import CPU_SIZES, make_cases
from oasiskv.bench.ops import OpTime, check_kernel, measure_ops
from oasiskv.bench.timing import Spread
from oasiskv.errors import ConfigError, StateError
from oasiskv.ops.digest import reference as digest
from oasiskv.ops.gather import reference as gather
from oasiskv.ops.plan import reference as plan
from oasiskv.ops.score import reference as score

SIZES = replace(CPU_SIZES, blocks=20, slots=12, budget=8, tiles=6)
NAMES = [
    "digest minmax",
    "digest keys4",
    "score minmax",
    "score keys4",
    "plan",
    "gather memory, head dim 64",
]
MODULES = {"digest": digest, "score": score, "plan": plan, "gather": gather}


def cases():
    return {case.name: case for case in make_cases(SIZES, torch.device("cpu"))}


def test_references_on_the_cpu():
    report = measure_ops("cpu", repeats=3, sizes=SIZES)
    assert report.device == "cpu"
    assert min(report.copy_gbps, report.h2d_gbps, report.d2h_gbps) > 0
    assert [(op.name, op.form) for op in report.ops] == [(name, "reference") for name in NAMES]
    for op in report.ops:
        assert op.time.repeats == 3
        assert 0 < op.time.low_us <= op.time.median_us <= op.time.high_us
        assert op.share == pytest.approx(op.floor_us / op.time.median_us)


def test_bytes_are_those_of_the_tensors():
    moved = {name: case.moved_bytes for name, case in cases().items()}
    tiles, heads, dim = 6, 2, 64
    assert moved["digest minmax"] == tiles * heads * (16 + 2) * dim * 4
    assert moved["digest keys4"] == tiles * heads * (16 * dim * 4 + 8 * dim + 4 * dim)
    assert moved["score minmax"] == 2 * 20 * heads * 2 * dim * 4
    assert moved["score keys4"] == 2 * 20 * heads * (8 * dim + 4 * dim)
    assert moved["gather memory, head dim 64"] == 2 * 8 * 16 * 2 * dim * 4


def test_only_some():
    assert [op.name for op in measure_ops("cpu", only="score", repeats=1, sizes=SIZES).ops] == [
        "score minmax",
        "score keys4",
    ]


def broken(op):
    """A form of the op that is wrong in one number."""

    def scores(*args):
        right = score.minmax_scores(*args)
        right[-1, -1, -1] *= 1.01
        return right

    def write(cache, source_index, digests, dest_index):
        digest.write_keys4(cache, source_index, digests, dest_index)
        digests.codes[0, 0, 0, 0] ^= 1

    def plan_rows(*args, **options):
        made = plan.plan_rows(*args, **options)
        made.victims[0, 0, :2] = made.victims[0, 0, :2].flip(0)
        return made

    def gather_rows(source, source_index, dest, dest_index):
        gather.gather_rows(source, source_index[1:], dest, dest_index[1:])

    return {
        "score minmax": SimpleNamespace(minmax_scores=scores),
        "digest keys4": SimpleNamespace(write_keys4=write),
        "plan": SimpleNamespace(plan_rows=plan_rows),
        "gather memory, head dim 64": SimpleNamespace(gather_rows=gather_rows),
    }[op]


@pytest.mark.parametrize("name", ["score minmax", "digest keys4", "plan"])
def test_a_right_kernel_passes(name):
    case = cases()[name]
    check_kernel(case, MODULES[case.op], MODULES[case.op])


@pytest.mark.parametrize(
    "name", ["score minmax", "digest keys4", "plan", "gather memory, head dim 64"]
)
def test_a_wrong_kernel_is_not_timed(name):
    case = cases()[name]
    with pytest.raises(StateError, match=f"{name} is not timed, its kernel is wrong"):
        check_kernel(case, MODULES[case.op], broken(name))


def test_nan_scores_are_wrong():
    case = cases()["score minmax"]
    nan = SimpleNamespace(minmax_scores=lambda *args: score.minmax_scores(*args) * torch.nan)
    with pytest.raises(StateError, match="relative error nan"):
        check_kernel(case, score, nan)


def test_spread_is_of_the_calls():
    assert Spread.of([float(n) for n in range(101, 0, -1)]) == Spread(51.0, 11.0, 91.0, 101)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0, 1)


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="device=tpu is not known"):
        measure_ops("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda needs a CUDA device"):
            measure_ops("cuda")


def test_command():
    pytest.importorskip("typer", reason="the command line is not installed")
    from typer.testing import CliRunner

    from oasiskv.bench.cli import app

    command = ["ops", "--device", "cpu", "--only", "plan", "--repeats", "2"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    (op,) = json.loads(result.stdout)["ops"]
    assert set(op) == {field.name for field in fields(OpTime)}
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0
    assert "plan: 2 rows x 256 blocks" in table.stdout
