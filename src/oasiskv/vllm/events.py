"""KV events: by them a router knows which prefixes the store holds, as it knows those in HBM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from oasiskv.vllm.compat import event_extra_keys

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

MEDIUM = "CPU"
"""What vLLM's own connectors call host memory in events."""


class StoreEvents:
    """What was published in the store and what is no longer found there, in order.

    Events are as vLLM's own of blocks in HBM, but for the medium.

    Args:
        spec: of the layers whose KV is stored.
        group: their group in vLLM's KV cache.
    """

    def __init__(self, spec: KVCacheSpec, group: int) -> None:
        self._kind: str = get_kv_cache_spec_kind(spec).value
        self._block_tokens = int(spec.block_size)
        self._group = group
        self._events: list[KVCacheEvent] = []

    def published(self, request: Request, index: int) -> None:
        """A block of a request is found from now on.

        Args:
            request: vLLM's.
            index: of the block among those of the request.
        """
        hashes, start = request.block_hashes, index * self._block_tokens
        stop = start + self._block_tokens
        tokens = list(request.all_token_ids[start:stop])
        keys = event_extra_keys(request, start, stop)
        block = maybe_convert_block_hash(hashes[index])
        before = maybe_convert_block_hash(hashes[index - 1]) if index else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == before:
            last.block_hashes.append(block)
            last.token_ids.extend(tokens)
            last.extra_keys.append(keys)
            return
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[block],
                parent_block_hash=before,
                token_ids=tokens,
                block_size=self._block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM,
                lora_name=lora.name if lora else None,
                extra_keys=[keys],
                group_idx=self._group,
                kv_cache_spec_kind=self._kind,
            )
        )

    def unpublished(self, block_hash: BlockHash) -> None:
        """Nothing is found by this hash any more."""
        block = maybe_convert_block_hash(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block)
            return
        self._events.append(
            BlockRemoved(block_hashes=[block], medium=MEDIUM, group_idx=self._group)
        )

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
