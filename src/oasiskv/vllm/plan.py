"""The memory plan: what the tiers take, and how many long requests fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oasiskv.config import OasisConfig
from oasiskv.vllm.shapes import sparse_group, store_capacity_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

GIB = 2**30
MIB = 2**20
NULL_BLOCKS = 1
"""Blocks of vLLM's pool that no request ever gets."""
OPEN_BLOCKS = 2
"""Blocks beside sink, hot set and window: the one being filled, and one not yet given back."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the tiers of one worker, in blocks.

    Args:
        pool_blocks: blocks of vLLM's pool in the fast tier.
        store_blocks: blocks of the host store.
        block_bytes: bytes of one block, all sparse layers and KV heads of the worker.
        digest_bytes: bytes of one block's digest.
        digests_in_pool: their memory was taken off the KV memory, rather than added to it.
        block_tokens: tokens of a block.
        longest_tokens: vLLM's ``max_model_len``.
        threshold_tokens: context length past which a request goes sparse.
        sink_blocks: blocks of the sink.
        hot_blocks: S, slots of a sparse request.
        window_blocks: closed blocks of the window.
        pool_block_bytes: bytes of one block of vLLM's pool. Layers of other groups use the same
            memory, which may be for more layers than those that may go sparse.
        most_requests: vLLM's ``max_num_seqs``.
        other_blocks: most blocks of one request in vLLM's other groups, as of sliding windows.
        workers: of the engine; each has tiers of these sizes.
    """

    pool_blocks: int
    store_blocks: int
    block_bytes: int
    digest_bytes: int
    digests_in_pool: bool
    block_tokens: int
    longest_tokens: int
    threshold_tokens: int
    sink_blocks: int
    hot_blocks: int
    window_blocks: int
    pool_block_bytes: int
    most_requests: int
    other_blocks: int = 0
    workers: int = 1

    @property
    def dense_blocks(self) -> int:
        """Blocks of a request of ``longest_tokens`` while it is dense."""
        return -(-self.longest_tokens // self.block_tokens)

    @property
    def stored_blocks(self) -> int:
        """Store blocks of such a request: all that close."""
        return self.longest_tokens // self.block_tokens

    @property
    def goes_sparse(self) -> bool:
        """Whether a request can ever pass the threshold."""
        return self.longest_tokens > self.threshold_tokens

    @property
    def sparse_blocks(self) -> int:
        """Blocks in the fast tier of such a request once sparse."""
        kept = self.sink_blocks + self.window_blocks + OPEN_BLOCKS
        return self.hot_blocks + min(kept, self.dense_blocks) + self.other_blocks

    @property
    def needed_pool_blocks(self) -> int:
        """Least pool in which such a request never waits for ever.

        Dense to its end and its slots beside it. The standing reserve for requests that are dense
        needs no more: those that come after it can be preempted, and then nothing is kept for them.
        """
        slots = self.hot_blocks if self.goes_sparse else 0
        return NULL_BLOCKS + self.dense_blocks + self.other_blocks + slots

    @property
    def digest_pool_blocks(self) -> int:
        """Blocks that vLLM's pool would have more without the digests."""
        if not self.digests_in_pool:
            return 0
        return self.store_blocks * self.digest_bytes // self.pool_block_bytes

    @property
    def dense_requests(self) -> int:
        """Requests of ``longest_tokens`` that vLLM alone would hold at once in this memory."""
        pool = self.pool_blocks + self.digest_pool_blocks
        return (pool - NULL_BLOCKS) // (self.dense_blocks + self.other_blocks)

    @property
    def in_pool(self) -> int:
        """Such requests that the pool holds at once: one in prefill, the others sparse."""
        if not self.goes_sparse:
            return (self.pool_blocks - NULL_BLOCKS) // (self.dense_blocks + self.other_blocks)
        beside = self.pool_blocks - self.needed_pool_blocks
        return 0 if beside < 0 else 1 + beside // self.sparse_blocks

    @property
    def in_store(self) -> int:
        """Such requests that the host store holds at once, each with its whole length."""
        return self.store_blocks // max(1, self.stored_blocks)

    @property
    def sparse_requests(self) -> int:
        """Such requests that fit at once with OasisKV, in every tier."""
        return min(self.in_pool, self.in_store)

    def with_room_for(self, requests: int) -> MemoryPlan:
        """The plan with a host store for so many such requests, in the same KV memory."""
        store = requests * self.stored_blocks
        pool = self.pool_blocks + self.digest_pool_blocks
        if self.digests_in_pool:
            pool -= -(-store * self.digest_bytes // self.pool_block_bytes)
        return replace(self, store_blocks=store, pool_blocks=pool)

    @property
    def best(self) -> MemoryPlan:
        """The plan with the least host store with which most such requests run.

        A larger store lets more in, and its digests leave less of the KV memory to the pool.
        """
        counts = range(1, min(self.with_room_for(0).in_pool, self.most_requests) + 1)
        best = bisect_left(counts, True, key=lambda n: self.with_room_for(n).in_pool < n)
        return self.with_room_for(best)

    @property
    def host_gib(self) -> str:
        """The host store of all workers, GiB."""
        return gib(self.store_blocks * self.block_bytes * self.workers)

    @property
    def holds_fewer(self) -> bool:
        """Whether vLLM alone would run more such requests at once."""
        return min(self.sparse_requests, self.most_requests) < min(
            self.dense_requests, self.most_requests
        )

    @property
    def limit(self) -> str:
        """Which tier limits how many such requests fit, and what to change."""
        if not self.goes_sparse:
            return (
                f"none of them passes the threshold of {self.threshold_tokens} tokens, so OasisKV "
                "makes no room: raise max_model_len, or lower hot_tokens or threshold_tokens"
            )
        fit = self.sparse_requests
        if self.most_requests <= fit:
            return f"max_num_seqs={self.most_requests} limits: {fit} fit"
        tier = "the host store" if self.in_store < self.in_pool else "the KV pool"
        best = self.best
        if best.sparse_requests > fit:
            return f"{tier} limits: host_gib={best.host_gib} would hold {best.sparse_requests}"
        return (
            f"{tier} limits: raise kv_cache_memory_bytes"
            f"{' and host_gib' if self.in_store <= self.in_pool else ''}, or lower hot_tokens"
        )

    def __str__(self) -> str:
        pool = self.pool_blocks * self.pool_block_bytes / GIB
        digests = self.store_blocks * self.digest_bytes / MIB
        store = self.store_blocks * self.block_bytes / GIB
        return (
            f"HBM (KV pool) {pool:.3f} GiB ({self.pool_blocks} blocks), digests {digests:.2f} MiB "
            f"{'taken off it' if self.digests_in_pool else 'beside it'}, host store {store:.3f} "
            f"GiB ({self.store_blocks} blocks), {self.block_bytes} bytes a block; requests of "
            f"max_model_len={self.longest_tokens} tokens that fit: {self.dense_requests} dense, "
            f"{self.sparse_requests} with OasisKV ({self.limit})"
        )


def gib(size: int) -> str:
    """``size`` bytes in GiB, rounded up, so that the number given is enough."""
    return f"{-(-size * 10000 // GIB) / 10000:.4f}"


def plan_of(vllm_config: VllmConfig, config: OasisConfig, cache: KVCacheConfig) -> MemoryPlan:
    """The plan of one worker.

    Raises:
        ConfigError: the layers are not what OasisKV supports, or ``host_gib`` is missing.
    """
    group = sparse_group(cache)
    spec = next(iter(group.specs.values()))
    others = [g.kv_cache_spec for i, g in enumerate(cache.kv_cache_groups) if i != group.index]
    workers = vllm_config.parallel_config.tensor_parallel_size
    return MemoryPlan(
        pool_blocks=cache.num_blocks,
        store_blocks=store_capacity_blocks(config, spec.block_bytes, workers),
        block_bytes=spec.block_bytes,
        digest_bytes=spec.digest_bytes,
        digests_in_pool=vllm_config.cache_config.num_gpu_blocks_override is None,
        block_tokens=spec.block_size,
        longest_tokens=vllm_config.model_config.max_model_len,
        threshold_tokens=config.resolved_threshold_tokens,
        sink_blocks=config.sink_blocks,
        hot_blocks=config.hot_blocks,
        window_blocks=config.window_blocks,
        pool_block_bytes=sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks,
        most_requests=vllm_config.scheduler_config.max_num_seqs,
        other_blocks=sum(
            -(-other.max_memory_usage_bytes(vllm_config) // other.page_size_bytes)
            for other in others
        ),
        workers=workers,
    )
