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
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.ops.digest.reference import Keys4
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
        meta: ``[5, rows]``, of the first rows of the state: first and end of the candidates, slots
            in use, query, step; None where no request is sparse.
    """

    closed: torch.Tensor
    leaving: torch.Tensor
    meta: torch.Tensor | None

    @classmethod
    def of(cls, flat: torch.Tensor, width: int) -> StepWork:
        """Views of int32 ``[4 * width + 5 * rows]``, or of ``[4 * width]`` where none is sparse."""
        closed, leaving = flat[: 2 * width], flat[2 * width : 4 * width]
        meta = flat[4 * width :]
        return cls(closed.view(2, -1), leaving.view(2, -1), meta.view(5, -1) if len(meta) else None)


class FirstFill(NamedTuple):
    """The transition of one request, all on the device, int32 but for ``row``.

    Attributes:
        row: int64 ``[1]``, of the state.
        number: ``[1]``, of the step.
        filled: ``[1]``, slots to fill.
        queries: ``[1]``, latest queries that choose.
        first: ``[n]``, first block between sink and window, once for each of ``n`` places.
        end: ``[n]``, one past the last.
        places: ``[n]``, of the latest queries in the ring, padded with any.
        blocks: ``[1, blocks]``, the engine's blocks, padded with any.
    """

    row: torch.Tensor
    number: torch.Tensor
    filled: torch.Tensor
    queries: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    places: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> FirstFill:
        """Views of int32 ``[4 + 3 * LATEST_QUERIES + blocks]``."""
        heads, places = flat[:4], flat[4 : 4 + 3 * LATEST_QUERIES].view(3, -1)
        return cls(
            row=heads[:1].long(),
            number=heads[1:2],
            filled=heads[2:3],
            queries=heads[3:],
            first=places[0],
            end=places[1],
            places=places[2],
            blocks=flat[4 + 3 * LATEST_QUERIES :].view(1, -1),
        )


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
        ring: ``[layers, rows + 1, ring_tokens, query heads, head_dim]``, queries; the last row is
            for those that nobody needs.
        resident: int32 ``[layers, rows, H, slots]``, block in each slot, -1 for none.
        last_wanted: int32 of the same shape, step that last wanted it, -1 for none.
        store_index: int32 ``[rows, blocks]``, store block of each closed block of a request.
        slots: int32 ``[rows, slots]``, the engine's block of each slot of a request.
        counts: int64 ``[2]``: ``moved_tiles`` and ``missed_tiles``, which are views.
        moved_tiles: int64, no dimension: tiles fetched by swap plans so far.
        missed_tiles: int64, no dimension: wanted tiles that were in no slot so far.
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
        shape = (layers, rows + 1, ring_tokens, geometry.num_query_heads, geometry.head_dim)
        self.ring = torch.empty(shape, dtype=geometry.dtype, device=device)
        self.resident = self._none(layers, rows, heads, slots)
        self.last_wanted = self._none(layers, rows, heads, slots)
        self.store_index = self._none(rows, geometry.blocks_for(max_tokens))
        self.slots = self._none(rows, slots)
        self._places = torch.arange(LATEST_QUERIES, device=device)
        self._blocks = torch.arange(self.store_index.shape[1], device=device)
        self._slots = torch.arange(slots, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.moved_tiles, self.missed_tiles = self.counts
        self._misses: list[torch.Tensor] = []
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
            if layer == self._geometry.num_layers - 1:
                self._count_misses()

    def load(self, layer: int, store_blocks: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy blocks from the store, int32 ``[n]`` each; -1 for none."""
        self._gather_whole(self._store.layer(layer), self._caches[layer], store_blocks, blocks)

    def restore(self, layer: int, row: int) -> None:
        """Copy tiles from the store to the slots of a row, as its resident map says."""
        own = slice(row, row + 1)
        blocks = self.resident[layer, own]
        self._ops.gather.gather_rows(
            self._store.layer(layer),
            blocks,
            self._caches[layer],
            self._slots.expand_as(blocks),
            self.store_index[own],
            self.slots[own],
        )

    def warm_up(self, width: int, rows: int) -> None:
        """Run every op on nothing, so that its kernel is compiled.

        Args:
            width: number of blocks that close, or leave, in a step.
            rows: of the state, from the first on.
        """
        device = self._device
        flat = torch.full((4 * width + 5 * rows,), -1, dtype=torch.int32, device=device)
        flat[4 * width :] = 0
        work = StepWork.of(flat, width)
        self.run(0, work, None)
        self._misses.clear()
        self.load(0, *work.closed)
        self.restore(0, 0)
        size = 4 + 3 * LATEST_QUERIES + self.store_index.shape[1]
        self.first_fill(0, FirstFill.of(torch.zeros(size, dtype=torch.int32, device=device)))

    def first_fill(self, layer: int, fill: FirstFill) -> None:
        """The transition: the latest queries choose, tiles go from HBM to slots."""
        each = len(fill.places)
        queries = self.ring[layer].index_select(0, fill.row).expand(each, -1, -1, -1)
        digests = self.store_index.index_select(0, fill.row).expand(each, -1)
        by_query = self._scores(layer, queries, fill.places, digests, fill.first, fill.end)
        counts = self._places < fill.queries
        scores = torch.where(counts[:, None, None], by_query, 0).sum(0)
        candidate = (self._blocks >= fill.first[0]) & (self._blocks < fill.end[0])
        order = torch.where(candidate, scores, -1).sort(dim=-1, descending=True, stable=True)[1]
        # The least wanted first, so that among equally old slots the worst goes first.
        rank = fill.filled - 1 - self._slots
        holds = rank >= 0
        best = order.gather(-1, rank.clamp(0, order.shape[-1] - 1).expand(len(order), -1))
        chosen = torch.where(holds, best, -1)
        wanted = torch.where(holds & (rank < self._config.budget_blocks), fill.number, -1)
        self.resident[layer].index_copy_(0, fill.row, chosen[None].int())
        wanted = wanted.int().expand_as(chosen)
        self.last_wanted[layer].index_copy_(0, fill.row, wanted[None])
        self._ops.gather.gather_rows(
            self._caches[layer],
            chosen[None],
            self._caches[layer],
            self._slots.expand_as(chosen)[None],
            fill.blocks,
            self.slots.index_select(0, fill.row),
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
        self, layer: int, queries: torch.Tensor, query: torch.Tensor, *where: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, H, blocks]``; ``where``: digest of each block, first and end of candidates."""
        digests, score = self.digests.layer(layer), self._ops.score
        if isinstance(digests, Keys4):
            scores = score.keys4_scores(queries, query, digests, *where, self._scale)
        else:
            mix = self._config.minmax_mix
            scores = score.minmax_scores(queries, query, digests, *where, mix, self._scale)
        return torch.as_tensor(scores)

    def _swap(self, layer: int, meta: torch.Tensor, observe: Observer | None) -> None:
        """Score, plan and transfer, for all sparse requests."""
        first, end, used, query, step = meta
        rows = len(first)
        index = self.store_index[:rows]
        plan = self._ops.plan.plan_rows(
            self._scores(layer, self.ring[layer, :rows], query, index, first, end),
            first,
            end,
            self.resident[layer, :rows],
            self.last_wanted[layer, :rows],
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
            index,
            self.slots[:rows],
        )
        self._misses.append(plan.misses)
        if observe is not None:
            observe(layer, plan.wanted)

    def _count_misses(self) -> None:
        """Those of all layers at once: an op in each would take longer than it all does."""
        self.missed_tiles += torch.stack(self._misses).sum()
        self._misses.clear()

    def _none(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self._device)
