"""What happens in one layer after a step, for all requests at once, on the device.

State has a row for each request. Nothing here waits for the device, and shapes depend on maxima
only, so that the layers of a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.score.reference import block_scores
from oasiskv.stores.host import HostStore

Observer = Callable[[int, torch.Tensor], None]
"""Called with a layer and its wanted blocks, ``[rows, H, K]``."""


class Ops(NamedTuple):
    """The modules whose functions run: the references, or the kernels of the same signatures."""

    digest: ModuleType
    score: ModuleType
    plan: ModuleType
    gather: ModuleType


def ops_on(device: torch.device) -> Ops:
    """Kernels on CUDA, references elsewhere."""
    form = "triton" if device.type == "cuda" else "reference"
    return Ops(*(import_module(f"oasiskv.ops.{op}.{form}") for op in Ops._fields))


class StepWork(NamedTuple):
    """What the layers do after one step, all int32 on the device.

    Attributes:
        closed: ``[2, n]``: engine's block and store block of blocks that close; -1 for none.
        leaving: ``[2, n]``: engine's block and slot of blocks that leave the window.
        meta: ``[5, rows]``: first and end of the candidates, slots in use, query, step; None where
            no request is sparse.
    """

    closed: torch.Tensor
    leaving: torch.Tensor
    meta: torch.Tensor | None


class FirstFill(NamedTuple):
    """The transition of one request.

    Attributes:
        row: of the state.
        first: first block between sink and window.
        end: one past the last.
        filled: slots to fill.
        places: int64 ``[n]``, places of its latest queries in the ring.
        blocks: int32 ``[1, blocks]``, the engine's blocks.
        number: of the step.
    """

    row: int
    first: int
    end: int
    filled: int
    places: torch.Tensor
    blocks: torch.Tensor
    number: int


class LayerState:
    """State of all requests, and the ops of a layer on it.

    Args:
        geometry: KV sizes of the layers that go sparse.
        config: settings.
        store: where closed blocks go.
        caches: the engine's KV tensor of each layer, ``[blocks, H, block_tokens, 2 * head_dim]``.
        rows: most requests.
        max_tokens: longest request.
        ring_tokens: queries kept of each request, by position modulo this.

    Attributes:
        digests: of the store's blocks.
        ring: ``[layers, rows, ring_tokens, query heads, head_dim]``, queries.
        resident: int32 ``[layers, rows, H, slots]``, block in each slot, -1 for none.
        last_wanted: int32 of the same shape, step that last wanted it, -1 for none.
        store_index: int32 ``[rows, blocks]``, store block of each closed block of a request.
        slots: int32 ``[rows, slots]``, the engine's block of each slot of a request.
        moved_tiles: int64, no dimension: tiles fetched by swap plans so far.
        nan_scores: int32 ``[1]``: scores of candidates that were NaN so far.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        config: OasisConfig,
        store: HostStore,
        caches: Sequence[torch.Tensor],
        rows: int,
        max_tokens: int,
        ring_tokens: int,
    ) -> None:
        device = caches[0].device
        self._geometry, self._config, self._store = geometry, config, store
        self._caches, self._device = list(caches), device
        self._ops = ops_on(device)
        self._scale = geometry.head_dim**-0.5
        self.digests = DigestPool(
            geometry, store.capacity_blocks, config.digest, config.minmax_mix, device
        )
        layers, heads, slots = geometry.num_layers, geometry.num_kv_heads, config.hot_blocks
        shape = (layers, rows, ring_tokens, geometry.num_query_heads, geometry.head_dim)
        self.ring = torch.empty(shape, dtype=geometry.dtype, device=device)
        self.resident = self._none(layers, rows, heads, slots)
        self.last_wanted = self._none(layers, rows, heads, slots)
        self.store_index = self._none(rows, geometry.blocks_for(max_tokens))
        self.slots = self._none(rows, slots)
        self.moved_tiles = torch.zeros((), dtype=torch.int64, device=device)
        self.nan_scores = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, from its storages; digests apart."""
        parts = (self.ring, self.resident, self.last_wanted, self.store_index, self.slots)
        return sum(part.untyped_storage().nbytes() for part in parts)

    def run(self, layer: int, work: StepWork, observe: Observer | None) -> None:
        """Write closed blocks through, keep what leaves the window, swap."""
        self._write_through(layer, *work.closed)
        self._gather_whole(self._caches[layer], self._caches[layer], *work.leaving)
        if work.meta is not None:
            self._swap(layer, work.meta, observe)

    def load(self, layer: int, store_blocks: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy blocks from the store, int32 ``[n]`` each; -1 for none."""
        self._gather_whole(self._store.layer(layer), self._caches[layer], store_blocks, blocks)

    def warm_up(self, widths: Sequence[int]) -> None:
        """Run every op on nothing, so that its kernel is compiled.

        Args:
            widths: numbers of blocks that close, or leave, in a step.
        """
        rows = len(self.slots)
        meta = torch.zeros((5, rows), dtype=torch.int32, device=self._device)
        for width in widths:
            pairs = self._none(2, width)
            self.run(0, StepWork(pairs, pairs, meta), None)
            self.load(0, *pairs)
        nothing = self._none(1, self._geometry.num_kv_heads, self.slots.shape[1]).long()
        cache = self._caches[0]
        blocks = self._none(1, self.store_index.shape[1])
        self._ops.gather.gather_rows(cache, nothing, cache, nothing, blocks, self.slots[:1])

    def first_fill(self, layer: int, fill: FirstFill) -> None:
        """The transition: the latest queries choose, tiles go from HBM to slots."""
        if not fill.filled:
            return
        row, device = fill.row, self._device
        queries = self.ring[layer, row].index_select(0, fill.places)[None]
        candidates = self.store_index[row, fill.first : fill.end]
        logits = self.digests.layer_logits(layer, queries, candidates.long(), self._scale)
        mask = torch.ones(1, len(candidates), dtype=torch.bool, device=device)
        scores = block_scores(logits, mask, self._geometry.num_kv_heads)[0]
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : fill.filled]
        # The least wanted first, so that among equally old slots the worst goes first.
        chosen = order.flip(-1) + fill.first
        rank = torch.arange(fill.filled - 1, -1, -1, device=device)
        self.resident[layer, row, :, : fill.filled] = chosen.int()
        wanted = torch.where(rank < self._config.budget_blocks, fill.number, -1).int()
        self.last_wanted[layer, row, :, : fill.filled] = wanted
        # All slots, so that the kernel is the same whatever the number of blocks.
        sources = torch.nn.functional.pad(chosen, (0, self.slots.shape[1] - fill.filled), value=-1)
        places = torch.arange(self.slots.shape[1], device=device).expand_as(sources)
        self._ops.gather.gather_rows(
            self._caches[layer],
            sources[None],
            self._caches[layer],
            places[None],
            fill.blocks,
            self.slots[row : row + 1],
        )

    def _write_through(self, layer: int, blocks: torch.Tensor, store_blocks: torch.Tensor) -> None:
        if not len(blocks):
            return
        cache, digests = self._caches[layer], self.digests.layer(layer)
        if isinstance(digests, Keys4):
            self._ops.digest.write_keys4(cache, blocks, digests, store_blocks)
        else:
            self._ops.digest.write_minmax(cache, blocks, digests, store_blocks)
        self._gather_whole(cache, self._store.layer(layer), blocks, store_blocks)

    def _gather_whole(
        self, source: torch.Tensor, dest: torch.Tensor, blocks: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Copy blocks with all their KV heads."""
        if len(blocks):
            shape = (1, self._geometry.num_kv_heads, -1)
            self._ops.gather.gather_rows(source, blocks.expand(shape), dest, to.expand(shape))

    def _scores(
        self, layer: int, first: torch.Tensor, end: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        digests = self.digests.layer(layer)
        where = (self.store_index, first, end)
        if isinstance(digests, Keys4):
            scores = self._ops.score.keys4_scores(
                self.ring[layer], query, digests, *where, self._scale
            )
        else:
            scores = self._ops.score.minmax_scores(
                self.ring[layer], query, digests, *where, self._config.minmax_mix, self._scale
            )
        return torch.as_tensor(scores)

    def _swap(self, layer: int, meta: torch.Tensor, observe: Observer | None) -> None:
        """Score, plan and transfer, for all sparse requests."""
        first, end, used, query, step = meta
        plan = self._ops.plan.plan_rows(
            self._scores(layer, first, end, query),
            first,
            end,
            self.resident[layer],
            self.last_wanted[layer],
            used,
            step[:1],
            self.nan_scores,
            budget=self._config.budget_blocks,
            cap=self._config.cap_blocks,
            hysteresis=self._config.hysteresis,
            commit=True,
        )
        self.moved_tiles += self._ops.gather.gather_rows(
            self._store.layer(layer),
            plan.sources,
            self._caches[layer],
            plan.victims,
            self.store_index,
            self.slots,
        )
        if observe is not None:
            observe(layer, plan.wanted)

    def _none(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self._device)
