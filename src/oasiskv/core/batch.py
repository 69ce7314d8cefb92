"""Tiering of all sparse requests of a step at once: state on the device, no synchronisation.

What ``Tiering`` does request by request, for a GPU: one call of each op per layer, whatever the
number of requests. Each request has a row of the state; rows without a request are skipped. The
host knows everything but which block is in which slot, which the plan decides on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.errors import StateError
from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.score.reference import block_scores
from oasiskv.stores.host import HostStore

_MOST_PAIRS = 128
"""Blocks that may close, or leave the window, in a step that is replayed as a graph."""


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


@dataclass(eq=False, kw_only=True)
class BatchRequest:
    """One request of the batch.

    Attributes:
        request_id: the caller's name for it.
        row: its row of the state.
        block_ids: gives the engine's block of each of its blocks, stale where given back.
        first: first token computed in this life; before it lies a prefix from a cache. None
            until a step has run.
        computed: tokens whose KV is in place.
        assigned: store blocks handed out to it that no block has taken yet.
        store_blocks: store block of each closed block, in order.
        slots: the engine's blocks that are its slots.
        sparse: it has made the transition.
        num_sinks: blocks of the sink, once sparse.
        window_start: first block of the window; 0 while dense.
        filled: slots that hold a block.
    """

    request_id: str
    row: int
    block_ids: Callable[[], Sequence[int]]
    first: int | None = None
    computed: int = 0
    assigned: list[int] = field(default_factory=list)
    store_blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sparse: bool = False
    num_sinks: int = 0
    window_start: int = 0
    filled: int = 0


class BatchStep(NamedTuple):
    """What a step did to one request.

    Attributes:
        request: the request.
        start: tokens whose KV was in place before.
        computed: tokens whose KV is in place now.
        lookahead: position of the token whose query looks ahead, once sparse.
        transition: a dense request, whose slots are there, is to go sparse.
    """

    request: BatchRequest
    start: int
    computed: int
    lookahead: int
    transition: bool


class QueryRows(NamedTuple):
    """Which queries of a forward are kept, and where.

    Attributes:
        source: int64 ``[n]``, tokens of the batch.
        dest: int64 ``[n]``, places in the ring of a layer.
    """

    source: torch.Tensor
    dest: torch.Tensor


class _Work(NamedTuple):
    """What the layers do after one step, on the device.

    Attributes:
        closed: int32 ``[2, n]``: engine's block and store block of blocks that close; -1 for none.
        leaving: int32 ``[2, n]``: engine's block and slot of blocks that leave the window.
        meta: int32 ``[5, rows]``: first and end of the candidates, slots in use, query, step.
    """

    closed: torch.Tensor
    leaving: torch.Tensor
    meta: torch.Tensor | None


class BatchTiering:
    """Write-through, transition, window, selection and transfers of all requests of a step.

    Args:
        geometry: KV sizes of the layers that go sparse.
        config: settings.
        store: where closed blocks go.
        caches: the engine's KV tensor of each layer, ``[blocks, H, block_tokens, 2 * head_dim]``.
        max_requests: rows of the state.
        max_tokens: longest request.
        max_drafts: most drafts of a request in one step.

    Attributes:
        resident: int32 ``[layers, rows, H, slots]``, block in each slot, -1 for none.
        last_wanted: int32 of the same shape, step that last wanted it, -1 for none.
        store_index: int32 ``[rows, blocks]``, store block of each closed block of a request.
        slots: int32 ``[rows, slots]``, the engine's block of each slot of a request.
        moved_tiles: int64, no dimension: tiles fetched by swap plans so far, on the device.
        nan_scores: int32 ``[1]``: scores of candidates that were NaN so far, on the device.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        config: OasisConfig,
        store: HostStore,
        caches: Sequence[torch.Tensor],
        max_requests: int,
        max_tokens: int,
        max_drafts: int,
    ) -> None:
        device = caches[0].device
        self._geometry, self._config, self._store = geometry, config, store
        self._caches, self._device = list(caches), device
        self._ops = ops_on(device)
        self.digests = DigestPool(
            geometry, store.capacity_blocks, config.digest, config.minmax_mix, device
        )
        self._scale = geometry.head_dim**-0.5
        layers, heads, slots = geometry.num_layers, geometry.num_kv_heads, config.hot_blocks
        blocks = geometry.blocks_for(max_tokens)
        self.resident = self._none(layers, max_requests, heads, slots)
        self.last_wanted = self._none(layers, max_requests, heads, slots)
        self.store_index = self._none(max_requests, blocks)
        self.slots = self._none(max_requests, slots)
        # Queries by position, modulo its length: the latest ones survive rejected drafts.
        self._ring_tokens = LATEST_QUERIES + max_drafts
        shape = (layers, max_requests, self._ring_tokens)
        self._ring = torch.empty(
            (*shape, geometry.num_query_heads, geometry.head_dim),
            dtype=geometry.dtype,
            device=device,
        )
        self._rows = max_requests
        self._inputs: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._compiled = False
        self._free_rows = list(range(max_requests))[::-1]
        self.moved_tiles = torch.zeros((), dtype=torch.int64, device=device)
        self.nan_scores = torch.zeros(1, dtype=torch.int32, device=device)

    def admit(self, request_id: str, block_ids: Callable[[], Sequence[int]]) -> BatchRequest:
        """Give a request a row.

        Args:
            request_id: the caller's name for it.
            block_ids: gives the engine's block of each of its blocks.

        Raises:
            StateError: all rows are taken.
        """
        if not self._free_rows:
            raise StateError(f"no row is free for request {request_id}")
        row = self._free_rows.pop()
        return BatchRequest(request_id=request_id, row=row, block_ids=block_ids)

    def release(self, request: BatchRequest) -> None:
        """An ended request gives its row and its digests back."""
        self.digests.release(request.store_blocks)
        request.store_blocks = []
        self._free_rows.append(request.row)

    def query_rows(self, spans: Sequence[tuple[BatchRequest, int, int, int]]) -> QueryRows:
        """Which queries of a forward to keep: the latest of each request.

        Args:
            spans: request, its first token in the batch, how many it has there, and the position of
                the first.
        """
        source, dest = [], []
        for request, start, count, position in spans:
            for index in range(max(0, count - self._ring_tokens), count):
                source.append(start + index)
                dest.append(self._place(request, position + index))
        both = self._upload([source, dest], torch.int64)
        return QueryRows(both[0], both[1])

    def keep_queries(self, layer: int, query: torch.Tensor, rows: QueryRows) -> None:
        """Keep queries of one layer, ``[tokens, query heads, head_dim]``."""
        ring = self._ring[layer].flatten(0, 1)
        ring.index_copy_(0, rows.dest, query.index_select(0, rows.source))

    def table(self, request: BatchRequest, tokens: int) -> tuple[list[int], int]:
        """The compact block table of a sparse request: sink, filled slots, window.

        Args:
            request: a sparse request.
            tokens: tokens of it, those of this step included.

        Returns:
            ``(engine's blocks, tokens in them)``.
        """
        ids = request.block_ids()
        end = self._geometry.blocks_for(tokens)
        window = ids[request.window_start : end]
        table = [*ids[: request.num_sinks], *request.slots[: request.filled], *window]
        gone = request.window_start - request.num_sinks - request.filled
        return table, tokens - gone * self._geometry.block_tokens

    def after_step(
        self,
        steps: Sequence[BatchStep],
        number: int,
        layer_done: Callable[[int], None],
        observe: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Everything between two forwards, enqueued on the current stream.

        Args:
            steps: what the step did to each request.
            number: of the step.
            layer_done: called after a layer's last op: what it reads may be written from there on.
            observe: called with a layer and its wanted blocks, ``[rows, H, K]``.
        """
        closing = [pair for step in steps for pair in self._close(step)]
        moving: list[tuple[BatchRequest, int, int]] = []
        for step in steps:
            if step.request.sparse:
                moving += self._advance(step.request)
        self._note_slots(moving, number)
        leaving = [(r.block_ids()[block], r.slots[slot]) for r, block, slot in moving]
        sparse = [step for step in steps if step.request.sparse]
        fresh = [step.request for step in steps if step.transition]
        meta = self._meta(sparse, number)
        few = max(len(closing), len(leaving)) <= _MOST_PAIRS
        if self._device.type == "cuda" and sparse and few and not fresh and observe is None:
            self._replay(closing, leaving, meta, layer_done)
            return
        work = _Work(
            self._upload(_columns(closing), torch.int32),
            self._upload(_columns(leaving), torch.int32),
            self._upload(meta, torch.int32) if sparse else None,
        )
        for layer in range(self._geometry.num_layers):
            self._layer(layer, work, observe)
            for request in fresh:
                self._first_fill(layer, request, number)
            layer_done(layer)
        for request in fresh:
            request.sparse = True

    def _replay(
        self,
        closing: Sequence[tuple[int, int]],
        leaving: Sequence[tuple[int, int]],
        meta: Sequence[Sequence[int]],
        layer_done: Callable[[int], None],
    ) -> None:
        """All layers as one graph: launching them one by one takes longer than they run."""
        padding = [(-1, -1)] * _MOST_PAIRS
        pairs = [*closing, *padding[len(closing) :]], [*leaving, *padding[len(leaving) :]]
        columns = [value for part in pairs for column in _columns(part) for value in column]
        values = columns + [value for row in meta for value in row]
        if self._inputs is None:
            self._inputs = self._upload(values, torch.int32)
        else:
            self._inputs.copy_(self._upload(values, torch.int32))
        if self._graph is not None:
            self._graph.replay()
            return
        sizes = [2 * _MOST_PAIRS, 2 * _MOST_PAIRS, 5 * self._rows]
        first, second, rest = torch.split(self._inputs, sizes)
        work = _Work(first.view(2, -1), second.view(2, -1), rest.view(5, -1))

        def run() -> None:
            for layer in range(self._geometry.num_layers):
                self._layer(layer, work, None)
                layer_done(layer)

        if not self._compiled:
            # The first time kernels are compiled, which a capture does not allow.
            self._compiled = True
            run()
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
        self._graph = graph
        graph.replay()

    def _layer(
        self,
        layer: int,
        work: _Work,
        observe: Callable[[int, torch.Tensor], None] | None,
    ) -> None:
        self._write_through(layer, *work.closed)
        self._copy_within(layer, *work.leaving)
        if work.meta is not None:
            self._swap(layer, work.meta, observe)

    def _close(self, step: BatchStep) -> list[tuple[int, int]]:
        """Pairs (engine's block, store block) of blocks that are full of accepted tokens now."""
        request = step.request
        size = self._geometry.block_tokens
        if request.first is None:
            request.first = step.start
        first = len(request.store_blocks)
        # Drafts may be accepted past the request's last token: it ends with this step, and no room
        # was kept in the store for them.
        most = (first + len(request.assigned) + 1) * size - 1
        request.computed = min(step.computed, most)
        end = request.computed // size
        if end == first:
            return []
        new, request.assigned = request.assigned[: end - first], request.assigned[end - first :]
        request.store_blocks += new
        self.digests.claim(new)
        self.store_index[request.row, first:end] = self._upload(new, torch.int32)
        return list(zip(request.block_ids()[first:end], new, strict=True))

    def _advance(self, request: BatchRequest) -> list[tuple[BatchRequest, int, int]]:
        """Move the window on; returns blocks that go to free slots: request, block, slot."""
        start = request.computed // self._geometry.block_tokens - self._config.window_blocks
        moving = []
        for block in range(request.window_start, start):
            if block < self._config.sink_blocks:
                request.num_sinks += 1
            elif request.filled < len(request.slots):
                moving.append((request, block, request.filled))
                request.filled += 1
        request.window_start = max(request.window_start, start)
        return moving

    def _note_slots(self, moving: Sequence[tuple[BatchRequest, int, int]], number: int) -> None:
        if not moving:
            return
        places = self._upload([[r.row for r, _, _ in moving], [s for _, _, s in moving]])
        blocks = self._upload([b for _, b, _ in moving], torch.int32)[:, None].expand(
            -1, self._geometry.num_kv_heads
        )
        self.resident[:, places[0], :, places[1]] = blocks[:, None]
        self.last_wanted[:, places[0], :, places[1]] = number

    def _meta(self, sparse: Sequence[BatchStep], number: int) -> list[list[int]]:
        """By row: first and end of the candidates, slots in use, query, step."""
        rows = self._rows
        first, end, used, query = [0] * rows, [0] * rows, [0] * rows, [0] * rows
        for step in sparse:
            row = step.request.row
            first[row], end[row] = self._config.sink_blocks, step.request.window_start
            used[row] = step.request.filled
            query[row] = step.lookahead % self._ring_tokens
        return [first, end, used, query, [number] * rows]

    def _write_through(self, layer: int, blocks: torch.Tensor, store_blocks: torch.Tensor) -> None:
        if not len(blocks):
            return
        cache, digests = self._caches[layer], self.digests.layer(layer)
        if isinstance(digests, Keys4):
            self._ops.digest.write_keys4(cache, blocks, digests, store_blocks)
        else:
            self._ops.digest.write_minmax(cache, blocks, digests, store_blocks)
        self._gather(cache, blocks, self._store.layer(layer), store_blocks)

    def _copy_within(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        if len(blocks):
            self._gather(self._caches[layer], blocks, self._caches[layer], slots)

    def _gather(
        self, source: torch.Tensor, blocks: torch.Tensor, dest: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Whole blocks, all KV heads."""
        heads = self._geometry.num_kv_heads
        self._ops.gather.gather_rows(
            source, blocks.expand(1, heads, -1), dest, to.expand(1, heads, -1)
        )

    def _scores(
        self, layer: int, first: torch.Tensor, end: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        digests = self.digests.layer(layer)
        where = (self.store_index, first, end)
        if isinstance(digests, Keys4):
            scores = self._ops.score.keys4_scores(
                self._ring[layer], query, digests, *where, self._scale
            )
        else:
            scores = self._ops.score.minmax_scores(
                self._ring[layer], query, digests, *where, self._config.minmax_mix, self._scale
            )
        return torch.as_tensor(scores)

    def _swap(
        self,
        layer: int,
        meta: torch.Tensor,
        observe: Callable[[int, torch.Tensor], None] | None,
    ) -> None:
        """Score, plan and transfer of one layer, for all sparse requests."""
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

    def _first_fill(self, layer: int, request: BatchRequest, number: int) -> None:
        """The transition of one layer: the latest queries choose, tiles go from HBM to slots."""
        config, size = self._config, self._geometry.block_tokens
        if layer == 0:
            request.window_start = max(0, request.computed // size - config.window_blocks)
            request.num_sinks = min(config.sink_blocks, request.window_start)
            request.filled = min(len(request.slots), request.window_start - request.num_sinks)
            self.slots[request.row] = self._upload(request.slots, torch.int32)
            self.resident[:, request.row] = -1
            self.last_wanted[:, request.row] = -1
        if not request.filled:
            return
        earliest = max(request.first or 0, request.computed - LATEST_QUERIES)
        places = [p % self._ring_tokens for p in range(earliest, request.computed)]
        queries = self._ring[layer, request.row].index_select(0, self._upload(places))[None]
        candidates = self.store_index[request.row, request.num_sinks : request.window_start]
        logits = self.digests.layer_logits(layer, queries, candidates.long(), self._scale)
        mask = torch.ones(1, len(candidates), dtype=torch.bool, device=self._device)
        scores = block_scores(logits, mask, self._geometry.num_kv_heads)[0]
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : request.filled]
        # The least wanted first, so that among equally old slots the worst goes first.
        chosen = order.flip(-1) + request.num_sinks
        rank = torch.arange(request.filled - 1, -1, -1, device=self._device)
        self.resident[layer, request.row, :, : request.filled] = chosen.int()
        wanted = torch.where(rank < config.budget_blocks, number, -1).int()
        self.last_wanted[layer, request.row, :, : request.filled] = wanted
        blocks = self._upload(list(request.block_ids()), torch.int32)
        slots = torch.arange(request.filled, device=self._device).expand(1, len(chosen), -1)
        self._ops.gather.gather_rows(
            self._caches[layer],
            chosen[None],
            self._caches[layer],
            slots,
            blocks[None],
            self.slots[request.row : request.row + 1],
        )

    def _none(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self._device)

    def _place(self, request: BatchRequest, position: int) -> int:
        return request.row * self._ring_tokens + position % self._ring_tokens

    def _upload(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self._device.type != "cuda":
            return host
        # From pinned memory the host need not wait for the copy.
        return host.pin_memory().to(self._device, non_blocking=True)


def _columns(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [[first for first, _ in pairs], [second for _, second in pairs]]
