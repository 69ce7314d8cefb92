"""Fast-tier memory of one request in vLLM's paged KV tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.core.residency import ResidentMap
from oasiskv.ops.gather.reference import gather_tiles


class PagedKV:
    """Implements ``KVMemory`` on blocks that the scheduler handed out.

    The sink and the window stay where vLLM put them; slots are the request's private blocks. What
    lies between is not touched once sparse: the scheduler may have given it to others.

    Args:
        geometry: sizes of a block.
        caches: per sparse layer vLLM's KV tensor, ``[blocks, heads, block_tokens, 2 * head_dim]``.
        sink_blocks: blocks of the sink.
        block_ids: gives vLLM's block of each block of the request, stale where given back.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        caches: Sequence[torch.Tensor],
        sink_blocks: int,
        block_ids: Callable[[], Sequence[int]],
    ) -> None:
        self._geometry = geometry
        self._caches = caches
        self._sink_blocks = sink_blocks
        self._block_ids = block_ids
        self.slots = self._ids(())
        self.window_start = 0
        self.num_sinks = 0
        self.sparse = False

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the request reads or writes."""
        blocks = len(self.held(len(self._block_ids())))
        if self.sparse:
            blocks += len(self.slots)
        return blocks * self._geometry.block_bytes

    def held(self, end: int) -> list[int]:
        """vLLM's blocks of blocks ``0..end-1`` of the request, slots and those given back apart."""
        ids = list(self._block_ids()[:end])
        return ids[: self.num_sinks] + ids[self.window_start :] if self.sparse else ids

    def take_slots(self, slots: Sequence[int]) -> None:
        """The scheduler has handed out slots, blocks of its pool."""
        self.slots = self._ids(slots)

    def tiles(self, first: int, end: int) -> torch.Tensor:
        """A copy of blocks ``first..end-1``, which are dense or in the window."""
        ids = self._ids(self._block_ids()[first:end])
        return torch.stack([cache[ids] for cache in self._caches], dim=1)

    def layer(self, layer: int) -> torch.Tensor:
        """vLLM's KV tensor of one sparse layer."""
        return self._caches[layer]

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """vLLM's block of each slot; -1 stays -1."""
        return torch.where(slots >= 0, self.slots[slots.clamp(min=0)], -1)

    def go_sparse(self, chosen: torch.Tensor, num_sinks: int, start: int, end: int) -> None:
        """The transition: fill the first slots; the scheduler gives back what is not kept."""
        ids = self._ids(self._block_ids())
        for cache, blocks in zip(self._caches, chosen, strict=True):
            slots = self.slots[: blocks.shape[-1]].expand_as(blocks)
            gather_tiles(cache, ids[blocks], cache, slots)
        self.sparse = True
        self.num_sinks = num_sinks
        self.window_start = start

    def resume(self, start: int) -> None:
        """It was sparse before it was preempted, with its window at ``start``, and is again."""
        self.sparse = True
        self.num_sinks = min(self._sink_blocks, start)
        self.window_start = start

    def advance(self, start: int, residents: ResidentMap, step: int) -> None:
        """Move the window on: a leaving block stays as sink, goes to a free slot, or away."""
        ids = self._block_ids()
        for block in range(self.window_start, start):
            if block < self._sink_blocks:
                self.num_sinks += 1
            elif residents.filled < residents.num_slots:
                slot = int(self.slots[residents.append(block, step)])
                for cache in self._caches:
                    cache[slot] = cache[ids[block]]
        self.window_start = start

    def table(self, tokens: int, filled: int) -> tuple[torch.Tensor, int]:
        """The compact block table: sink, filled slots, window.

        Args:
            tokens: tokens of the request, those of this step included.
            filled: slots that hold a block.

        Returns:
            ``(block_table, kv_tokens)``.
        """
        ids = self._ids(self._block_ids())
        end = self._geometry.blocks_for(tokens)
        parts = (ids[: self.num_sinks], self.slots[:filled], ids[self.window_start : end])
        gone = self.window_start - self.num_sinks - filled
        return torch.cat(parts), tokens - gone * self._geometry.block_tokens

    def blank(self, first: int, end: int) -> None:
        """Zero the KV of tokens ``first..end-1``, which are dense or in the window."""
        ids = self._block_ids()
        size = self._geometry.block_tokens
        for token in range(first, end):
            for cache in self._caches:
                cache[ids[token // size], :, token % size] = 0

    def drop(self) -> None:
        """The scheduler has the blocks back already."""
        self.slots = self.slots[:0]

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Blocks as int64, where the KV tensors are."""
        return torch.tensor(blocks, dtype=torch.int64, device=self._caches[0].device)
