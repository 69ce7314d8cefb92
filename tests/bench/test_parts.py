"""Time of a step by part, from what ran on the device."""

import json

import pytest
import torch

from oasiskv.bench.parts import Interval, part_of, profile_steps, read_trace, split, union_us

NAMES = {
    "_keys4_logits_kernel": "scores",
    "_minmax_logits_kernel": "scores",
    "_scores_kernel": "scores",
    "_plan_kernel": "plan",
    "_gather_kernel": "gather",
    "_keys4_kernel": "digest",
    "_minmax_kernel": "digest",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, ...>": "other",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90": "attention",
    "flash::prepare_varlen_num_blocks_kernel(int, int, int)": "attention",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "matrix products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix products",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)": "other",
    "triton_red_fused_add_mean_mul_pow_rsqrt_0": "other",
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_kernels_by_name(name, part):
    assert part_of(name) == part


def test_overlaps_count_once():
    inside = Interval("b", 12.0, 15.0)
    assert union_us([Interval("a", 10.0, 20.0), inside, Interval("c", 18.0, 25.0)]) == 15.0
    assert union_us([Interval("c", 30.0, 31.0), Interval("a", 10.0, 20.0)]) == 11.0
    assert union_us([]) == 0.0


def test_parts_are_of_one_step():
    intervals = [
        Interval("nvjet_a", 0.0, 4000.0),
        Interval("_keys4_logits_kernel", 1000.0, 3000.0),
        Interval("nvjet_a", 9000.0, 13000.0),
        Interval("rms_norm", 13000.0, 15000.0),
    ]
    found = split(intervals, steps=2, step_ms=8.0)
    assert (found.busy_ms, found.idle_ms) == (5.0, 3.0)
    spent = {part: ms for part, ms in found.parts_ms.items() if ms}
    assert spent == {"matrix products": 4.0, "scores": 1.0, "other": 1.0}
    assert found.others_ms == {"rms_norm": 1.0}


def test_a_trace_holds_what_ran_on_the_device(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "_plan_kernel", "ts": 5.5, "dur": 2.0}
    copy = kernel | {"cat": "gpu_memcpy", "name": "Memcpy DtoH"}
    call = kernel | {"cat": "cuda_runtime", "name": "cudaGraphLaunch"}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M"}, kernel, copy, call]}))
    assert read_trace(path) == [
        Interval("_plan_kernel", 5.5, 7.5),
        Interval("Memcpy DtoH", 5.5, 7.5),
    ]


def test_profiled_calls():
    calls = []
    found = profile_steps(lambda: calls.append(torch.ones(3).sum()), 3)
    assert len(calls) == found.steps == 3
    assert found.step_ms > 0
    if not torch.cuda.is_available():
        assert (found.busy_ms, found.idle_ms) == (0.0, found.step_ms)
