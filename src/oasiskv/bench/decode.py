"""Decoding speed at a fixed number of requests: stock vLLM, then OasisKV, on one GPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import LlamaConfig

from oasiskv.bench.in_process import add_random_requests, closed_engine, vllm_in_process
from oasiskv.config import BLOCK_TOKENS, OasisConfig

SHAPES = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
}
"""Models without weights: sizes that times depend on."""


@dataclass(frozen=True)
class DecodeLoad:
    """Requests that decode at once.

    Args:
        requests: how many.
        prompt_tokens: random tokens of each prompt.
        warm_steps: steps after the last prompt that are not timed.
        steps: steps that are timed.
    """

    requests: int = 16
    prompt_tokens: int = 16384
    warm_steps: int = 16
    steps: int = 128


@dataclass(frozen=True)
class DecodeReport:
    """What one engine did.

    Args:
        prefill_s: wall time until all requests decode.
        step_ms: median time of a step.
        low_ms: its 10th percentile.
        high_ms: its 90th percentile.
        tokens_per_s: of all requests, from the median.
        pool_blocks: blocks in use at the end.
        fetched_bytes_per_step: store to slots, mean over the timed steps.
    """

    prefill_s: float
    step_ms: float
    low_ms: float
    high_ms: float
    tokens_per_s: float
    pool_blocks: int
    fetched_bytes_per_step: float


def measure_decode(
    load: DecodeLoad, config: OasisConfig, model: str | Path
) -> tuple[DecodeReport, DecodeReport]:
    """Time both engines, one after the other, in this process.

    Args:
        load: the requests.
        config: OasisKV's settings, with ``host_gib``.
        model: folder or hub id, or a name of ``SHAPES``, which has random weights: attention is
            then nearly uniform, and what is fetched says nothing.

    Returns:
        ``(stock, oasis)``.

    Raises:
        ConfigError: vLLM is not installed, OasisKV is switched off, or a size is not legal.
    """
    with TemporaryDirectory() as temporary, vllm_in_process() as plugin_args:
        engine: dict[str, Any] = {"model": str(model)}
        if model in SHAPES:
            LlamaConfig(
                **SHAPES[str(model)],
                max_position_embeddings=131072,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
                dtype="bfloat16",
                architectures=["LlamaForCausalLM"],
            ).save_pretrained(temporary)
            engine = {"model": temporary, "load_format": "dummy"}
        longest = load.prompt_tokens + load.warm_steps + load.steps + load.requests + 64
        engine |= {
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "block_size": BLOCK_TOKENS,
            "max_model_len": longest,
            "max_num_seqs": load.requests,
            "gpu_memory_utilization": 0.85,
        }
        return _run(load, engine), _run(load, engine | plugin_args(config))


def _run(load: DecodeLoad, engine_args: dict[str, Any]) -> DecodeReport:
    """The load on one engine, which is closed at the end."""
    with closed_engine(engine_args) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        add_random_requests(llm, load.requests, load.prompt_tokens, new_tokens=10**6)
        start = time.perf_counter()
        while any(r.num_output_tokens == 0 for r in scheduler.requests.values()):
            engine.step()
        prefill = time.perf_counter() - start
        for _ in range(load.warm_steps):
            engine.step()
        before = _moved_bytes(engine_args)
        times = []
        for _ in range(load.steps):
            start = time.perf_counter()
            engine.step()
            times.append(1000 * (time.perf_counter() - start))
        fetched = (_moved_bytes(engine_args) - before) / load.steps
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        engine.abort_request([str(index) for index in range(load.requests)])
    deciles = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    return DecodeReport(
        prefill_s=prefill,
        step_ms=median,
        low_ms=deciles[0],
        high_ms=deciles[-1],
        tokens_per_s=1000 * load.requests / median,
        pool_blocks=used,
        fetched_bytes_per_step=fetched,
    )


def _moved_bytes(engine_args: dict[str, Any]) -> int:
    """Bytes fetched so far; 0 for stock."""
    if "kv_transfer_config" not in engine_args:
        return 0
    from oasiskv.vllm.runtime import current_runtime

    target = current_runtime().batched
    return int(target.tiering.state.moved_tiles) * target.geometry.tile_bytes
