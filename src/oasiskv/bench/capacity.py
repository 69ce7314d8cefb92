"""How many requests decode at once in a KV pool of a given size: stock vLLM, then OasisKV."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oasiskv.bench.in_process import (
    BATCHED_TOKENS,
    STOCK_BLOCK_TOKENS,
    add_requests,
    closed_engine,
    random_prompts,
    vllm_in_process,
)
from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once, and the KV memory that they share.

    Args:
        requests: how many.
        prompt_tokens: random tokens of each prompt.
        new_tokens: tokens decoded of each.
        pool_tokens: tokens that stock's KV pool holds, which fills the KV memory; None: the most
            with which it does not take in a third request.
        seed: of the prompts.

    Raises:
        ConfigError: a number is not positive.
    """

    requests: int = 8
    prompt_tokens: int = 2000
    new_tokens: int = 256
    pool_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not legal: at least 1 is needed"
                )

    @property
    def request_tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def stock_blocks(self) -> int:
        """Blocks of stock's pool, vLLM's null block included."""
        request = -(-self.request_tokens // STOCK_BLOCK_TOKENS)
        if self.pool_tokens is None:
            prompt = -(-self.prompt_tokens // STOCK_BLOCK_TOKENS)
            return max(2 * request, 3 * prompt - 1) + 1
        return -(-self.pool_tokens // STOCK_BLOCK_TOKENS) + 1

    def check(self, config: OasisConfig) -> None:
        """Refuse KV memory that cannot hold one request and its slots, digests apart.

        Raises:
            ConfigError: with the tokens that are needed.
        """
        blocks = -(-self.request_tokens // BLOCK_TOKENS) + config.hot_blocks
        usable = (self.stock_blocks - 1) * STOCK_BLOCK_TOKENS
        if usable < blocks * BLOCK_TOKENS:
            raise ConfigError(
                f"pool_tokens={usable} cannot hold one request of {self.request_tokens} tokens and "
                f"its hot set: at least {blocks * BLOCK_TOKENS} are needed"
            )


@dataclass
class EngineReport:
    """What one engine did with the workload. Blocks are those of ``block_tokens`` tokens.

    Attributes:
        block_tokens: tokens of one block.
        pool_blocks: blocks of the pool, vLLM's null block included.
        pool_bytes: bytes of the pool; with the digests, of the KV memory.
        decoding_at_once: most requests past their prompt and running after one step.
        preemptions: over all requests.
        peak_pool_blocks: most blocks of the pool in use after one step.
        dense_peak_blocks: most blocks held by a request before the transition, slots included.
        decode_peak_blocks: most blocks held by a request beyond the transition; None if none was.
        decode_least_blocks: fewest, over all requests and steps; the peak: constant.
        steps: of the engine.
        seconds: wall time of these.
        store_peak_blocks: most store blocks in use after one step.
        store_bytes: the host store.
        digest_bytes: digests, in the fast tier.
    """

    block_tokens: int
    pool_blocks: int
    pool_bytes: int
    decoding_at_once: int = 0
    preemptions: int = 0
    peak_pool_blocks: int = 0
    dense_peak_blocks: int = 0
    decode_peak_blocks: int | None = None
    decode_least_blocks: int | None = None
    steps: int = 0
    seconds: float = 0.0
    store_peak_blocks: int = 0
    store_bytes: int = 0
    digest_bytes: int = 0


class _Sampler:
    """Reads the scheduler after each step into a report."""

    def __init__(self, scheduler: Any, report: EngineReport) -> None:  # noqa: ANN401 - vLLM's
        self._scheduler = scheduler
        self._report = report

    def sample(self) -> None:
        """Take in one step."""
        from oasiskv.vllm.scheduling import state_of

        manager = self._scheduler.kv_cache_manager
        pool = manager.block_pool
        tables = manager.coordinator.single_type_managers[0].req_to_blocks
        state = state_of(pool)
        report = self._report
        running = self._scheduler.running
        decoding = sum(r.num_computed_tokens >= r.num_prompt_tokens for r in running)
        report.decoding_at_once = max(report.decoding_at_once, decoding)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        report.peak_pool_blocks = max(report.peak_pool_blocks, used)
        if state.store is not None:
            stored = state.store.capacity_blocks - state.store.free_blocks
            report.store_peak_blocks = max(report.store_peak_blocks, stored)
        for request in running:
            name = request.request_id
            table = tables[name]
            held = sum(not block.is_null for block in table)
            own = state.requests.get(name)
            held += len(own.hot) if own is not None else 0
            if any(block.is_null for block in table):
                report.decode_peak_blocks = max(report.decode_peak_blocks or held, held)
                report.decode_least_blocks = min(report.decode_least_blocks or held, held)
            else:
                report.dense_peak_blocks = max(report.dense_peak_blocks, held)


def measure(
    workload: Workload, config: OasisConfig, model: str | Path | None = None
) -> tuple[EngineReport, EngineReport]:
    """Run the workload on stock vLLM and on OasisKV, in the same KV memory, in this process.

    OasisKV's digests are taken off it, so that its pool is smaller.

    Args:
        workload: the requests and the pool.
        config: OasisKV's settings; ``host_gib`` None: what the requests need.
        model: folder or hub id; None: a random Llama of two layers.

    Returns:
        ``(stock, oasis)``.

    Raises:
        ConfigError: vLLM is not installed, OasisKV is switched off, or the pool cannot hold one
            request.
    """
    workload.check(config)
    with TemporaryDirectory() as temporary, vllm_in_process() as plugin_args:
        folder = model or save_random_llama(Path(temporary), workload.request_tokens)
        # Stock's pool counts, not the memory it is part of; vLLM wants some of that named.
        pool = {"num_gpu_blocks_override": workload.stock_blocks, "kv_cache_memory_bytes": 2**30}
        stock = _run(folder, workload, STOCK_BLOCK_TOKENS, pool)
        if config.host_gib is None:
            blocks = workload.requests * -(-workload.request_tokens // BLOCK_TOKENS)
            block_bytes = stock.pool_bytes / stock.pool_blocks * BLOCK_TOKENS / STOCK_BLOCK_TOKENS
            config = config.model_copy(update={"host_gib": (blocks + 1) * block_bytes / 2**30})
        plugin = plugin_args(config)
        plugin["kv_cache_memory_bytes"] = stock.pool_bytes
        return stock, _run(folder, workload, BLOCK_TOKENS, plugin)


def save_random_llama(folder: Path, max_tokens: int) -> Path:
    """Save a random Llama of two layers, large enough weights to tell tokens apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_tokens,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _run(
    folder: Path | str, workload: Workload, block_tokens: int, engine_args: dict[str, Any]
) -> EngineReport:
    """The workload on one engine, which is closed at the end."""
    settings = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": block_tokens,
        "max_model_len": workload.request_tokens,
        "max_num_seqs": workload.requests,
        "max_num_batched_tokens": BATCHED_TOKENS,
    }
    with closed_engine(settings | engine_args) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        pool_bytes = sum(tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors)
        report = EngineReport(block_tokens, scheduler.kv_cache_config.num_blocks, pool_bytes)
        prompts = random_prompts(llm, workload.requests, workload.prompt_tokens, workload.seed)
        add_requests(llm, prompts, workload.new_tokens)
        requests = list(scheduler.requests.values())
        sampler = _Sampler(scheduler, report)
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            report.steps += 1
            sampler.sample()
        report.seconds = time.perf_counter() - start
        report.preemptions = sum(request.num_preemptions for request in requests)
        if "kv_transfer_config" in engine_args:
            from oasiskv.vllm.runtime import current_runtime

            for model in current_runtime().models:
                report.store_bytes += model.store.nbytes
                report.digest_bytes += model.digests.nbytes
    return report
