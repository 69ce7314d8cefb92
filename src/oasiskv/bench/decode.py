"""Speed at a fixed number of requests: stock vLLM, then OasisKV, on one GPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig

from oasiskv.bench.in_process import (
    STOCK_BLOCK_TOKENS,
    add_requests,
    closed_engine,
    novel_prompts,
    random_prompts,
    vllm_in_process,
)
from oasiskv.bench.parts import StepParts, profile_steps
from oasiskv.config import BLOCK_TOKENS, OasisConfig

if TYPE_CHECKING:
    from vllm import LLM

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
        prompt_tokens: of each prompt.
        draft_tokens: n-gram drafts a step and request, for both engines; 0: none.
        prefill_requests: how many of the prompts prefill alone is timed on.
        warm_steps: steps after the last prompt that are not timed.
        steps: steps that are timed.
        profiled_steps: steps after these that run under the profiler.
    """

    requests: int = 16
    prompt_tokens: int = 16384
    draft_tokens: int = 0
    prefill_requests: int = 4
    warm_steps: int = 16
    steps: int = 128
    profiled_steps: int = 8

    @property
    def most_tokens(self) -> int:
        """Tokens that a request may come to: it decodes while later ones are prefilled, too."""
        steps = self.warm_steps + self.steps + self.profiled_steps + self.requests
        return self.prompt_tokens + steps * (1 + self.draft_tokens) + 64


@dataclass(frozen=True)
class DecodeReport:
    """What one engine did.

    Args:
        prefill_tokens_per_s: prompts alone, of which one token each is decoded.
        all_decode_s: wall time until all requests decode; early ones decode meanwhile.
        step_ms: median time of a step.
        low_ms: its 10th percentile.
        high_ms: its 90th percentile.
        tokens_per_step: of all requests, mean.
        tokens_per_s: the same over the median step.
        pool_blocks: blocks in use after the timed steps.
        block_tokens: tokens of one block.
        fetched_bytes_per_step: store to slots, mean over the timed steps.
        parts: where the time of a step goes.
    """

    prefill_tokens_per_s: float
    all_decode_s: float
    step_ms: float
    low_ms: float
    high_ms: float
    tokens_per_step: float
    tokens_per_s: float
    pool_blocks: int
    block_tokens: int
    fetched_bytes_per_step: float
    parts: StepParts


def measure_decode(
    load: DecodeLoad, config: OasisConfig, model: str | Path
) -> tuple[DecodeReport, DecodeReport]:
    """Time both engines, one after the other, in this process.

    Args:
        load: the requests.
        config: OasisKV's settings, with ``host_gib``.
        model: folder or hub id, prompted with the bundled novel; or a name of ``SHAPES``, which has
            random weights and random prompts: attention is then nearly uniform, and what is fetched
            says nothing.

    Returns:
        ``(stock, oasis)``.

    Raises:
        ConfigError: vLLM is not installed, OasisKV is switched off, or a size is not legal.
    """
    with TemporaryDirectory() as temporary, vllm_in_process() as plugin_args:
        engine: dict[str, Any] = {"model": str(model)}
        prompts = None
        if model in SHAPES:
            LlamaConfig(
                **SHAPES[str(model)],
                max_position_embeddings=131072,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
                dtype="bfloat16",
                architectures=["LlamaForCausalLM"],
            ).save_pretrained(temporary)
            engine = {"model": temporary, "load_format": "dummy"}
        else:
            prompts = novel_prompts(model, load.requests, load.prompt_tokens)
        engine |= {
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "max_model_len": load.most_tokens,
            "max_num_seqs": load.requests,
        }
        engine |= _device_args()
        if load.draft_tokens:
            engine["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": load.draft_tokens,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        return _run(load, prompts, engine), _run(load, prompts, engine | plugin_args(config))


def _device_args() -> dict[str, Any]:
    """What a GPU takes, or, to try the bench on, vLLM's CPU build."""
    if torch.cuda.is_available():
        return {"block_size": BLOCK_TOKENS, "gpu_memory_utilization": 0.85}
    return {
        "block_size": STOCK_BLOCK_TOKENS,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**30,
    }


def _run(
    load: DecodeLoad, prompts: list[list[int]] | None, engine_args: dict[str, Any]
) -> DecodeReport:
    """The load on one engine, which is closed at the end; random prompts if there are none."""
    with closed_engine(engine_args) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        prompts = prompts or random_prompts(llm, load.requests, load.prompt_tokens)
        # What is compiled or allocated at first use is not timed.
        _prefill_seconds(llm, prompts[:1])
        few = prompts[: load.prefill_requests]
        prefill = sum(map(len, few)) / _prefill_seconds(llm, few)

        add_requests(llm, prompts, new_tokens=10**6)
        start = time.perf_counter()
        while any(r.num_output_tokens == 0 for r in scheduler.requests.values()):
            engine.step()
        all_decode = time.perf_counter() - start
        for _ in range(load.warm_steps):
            engine.step()
        requests = list(scheduler.requests.values())
        moved, tokens = _moved_bytes(engine_args), sum(r.num_output_tokens for r in requests)
        times = []
        for _ in range(load.steps):
            start = time.perf_counter()
            engine.step()
            times.append(1000 * (time.perf_counter() - start))
        moved = _moved_bytes(engine_args) - moved
        tokens = sum(r.num_output_tokens for r in requests) - tokens
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        parts = profile_steps(engine.step, load.profiled_steps)
        engine.abort_request([str(index) for index in range(load.requests)])
    deciles = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    return DecodeReport(
        prefill_tokens_per_s=prefill,
        all_decode_s=all_decode,
        step_ms=median,
        low_ms=deciles[0],
        high_ms=deciles[-1],
        tokens_per_step=tokens / load.steps,
        tokens_per_s=1000 * tokens / load.steps / median,
        pool_blocks=used,
        block_tokens=scheduler.block_size,
        fetched_bytes_per_step=moved / load.steps,
        parts=parts,
    )


def _prefill_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Time in which the prompts are prefilled, and what that starts on the device is done."""
    add_requests(llm, prompts, new_tokens=1)
    start = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _moved_bytes(engine_args: dict[str, Any]) -> int:
    """Bytes fetched so far; 0 for stock."""
    if "kv_transfer_config" not in engine_args:
        return 0
    from oasiskv.vllm.runtime import current_runtime

    target = current_runtime().batched
    return int(target.tiering.state.moved_tiles) * target.geometry.tile_bytes
