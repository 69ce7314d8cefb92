"""Tiering of all requests of a step at once, without waiting for the device.

What ``Tiering`` does request by request, for a GPU: one call of each op per layer, whatever the
number of requests. The host knows everything but which block is in which slot, which the plan
decides on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.batch_graphs import LayerGraphs
from oasiskv.core.batch_layer import FirstFill, LayerState, Observer, StepWork
from oasiskv.core.batch_limits import BatchLimits
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.kept import KeptSlots
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.errors import StateError
from oasiskv.stores.host import HostStore


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
        computed: tokens whose KV is in place now; the blocks that they close were assigned.
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
        source: int64 ``[n]``, tokens of the batch; None for its first ``n``.
        dest: int64 ``[n]``, places in the ring of a layer.
    """

    source: torch.Tensor | None
    dest: torch.Tensor


class BatchTiering:
    """Write-through, transition, window, selection and transfers of all requests of a step.

    Args:
        geometry: KV sizes of the layers that go sparse.
        config: settings.
        store: where closed blocks go.
        caches: the engine's KV tensor of each layer, ``[blocks, H, block_tokens, 2 * head_dim]``.
        limits: what the state is sized by.
        layer_done: called after a layer's last op on the current stream, in the order of layers,
            while it is enqueued or captured: what it reads may be written from there on.

    Attributes:
        state: of all requests, on the device.
        free_rows: rows of it that no request has, a heap: the first ones are taken first, so that
            few are looked at while few are taken.
        graphs: the layers of a step, captured on the current stream, on which ``after_step`` has to
            be called; None off CUDA.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        config: OasisConfig,
        store: HostStore,
        caches: Sequence[torch.Tensor],
        limits: BatchLimits,
        layer_done: Callable[[int], None],
    ) -> None:
        self._geometry, self._config, self._layer_done = geometry, config, layer_done
        self._device = caches[0].device
        self._ring_tokens = limits.ring_tokens
        self._rows = limits.max_requests
        self.state = LayerState(
            geometry, config, store, caches, self._rows, limits.max_tokens, self._ring_tokens
        )
        self.free_rows = list(range(self._rows))
        self._widths = limits.widths(geometry.block_tokens)
        self._row_counts = limits.row_counts()
        self._most_blocks = geometry.blocks_for(limits.max_tokens)
        self.graphs: LayerGraphs | None = None
        if self._device.type == "cuda":
            keys = list(product(self._widths, self._row_counts))
            for width, rows in keys:
                self.state.warm_up(width, rows)
            sizes = {(width, rows): 4 * width + 5 * rows for width, rows in keys}
            fill_size = 4 + 3 * LATEST_QUERIES + self._most_blocks
            self.graphs = LayerGraphs(
                self.state, geometry.num_layers, sizes, fill_size, layer_done, self._device
            )

    def admit(self, request_id: str, block_ids: Callable[[], Sequence[int]]) -> BatchRequest:
        """Give a request a row.

        Args:
            request_id: the caller's name for it.
            block_ids: gives the engine's block of each of its blocks.

        Raises:
            StateError: all rows are taken.
        """
        if not self.free_rows:
            raise StateError(f"no row is free for request {request_id}")
        row = heappop(self.free_rows)
        return BatchRequest(request_id=request_id, row=row, block_ids=block_ids)

    def adopt(self, request: BatchRequest, blocks: Sequence[int]) -> None:
        """A request that has just started finds its first blocks in the store, with their digests.

        Args:
            request: no block of it has closed.
            blocks: store blocks, in order; the caller has taken them.
        """
        if blocks:
            request.store_blocks = list(blocks)
            self.state.digests.claim(blocks)
            index = self.upload(list(blocks), torch.int32)
            self.state.store_index[request.row, : len(blocks)] = index

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the store to the engine's, all layers.

        Args:
            pairs: store block and engine's block.
        """
        for part in _parts(pairs, self._widths[-1]):
            both = self.upload(_columns(part, self._width(len(part))), torch.int32).view(2, -1)
            for layer in range(self._geometry.num_layers):
                self.state.load(layer, both[0], both[1])

    def keep_slots(self, request: BatchRequest) -> KeptSlots:
        """What is in the slots of a sparse request that is being preempted."""
        state, row = self.state, request.row
        blocks, last_wanted = state.resident[:, row], state.last_wanted[:, row]
        return KeptSlots.copy(blocks, last_wanted, request.filled, request.window_start)

    def resume(self, request: BatchRequest, kept: KeptSlots) -> None:
        """A request that has its store blocks and its slots is sparse again, as it was."""
        state, row = self.state, request.row
        request.sparse, request.filled = True, kept.filled
        request.window_start = kept.window_start
        request.num_sinks = min(self._config.sink_blocks, kept.window_start)
        state.slots[row] = self.upload(request.slots, torch.int32)
        state.resident[:, row].copy_(kept.blocks, non_blocking=True)
        state.last_wanted[:, row].copy_(kept.last_wanted, non_blocking=True)
        for layer in range(self._geometry.num_layers):
            state.restore(layer, row)

    def release(self, request: BatchRequest) -> None:
        """An ended request gives its row and its digests back."""
        self.state.digests.release(request.store_blocks)
        request.store_blocks = []
        heappush(self.free_rows, request.row)

    @property
    def unneeded_place(self) -> int:
        """A place in the ring of a layer for queries that nobody needs."""
        return self._rows * self._ring_tokens

    def query_places(
        self, spans: Sequence[tuple[BatchRequest, int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Which queries of a forward to keep, the latest of each request, and where.

        Args:
            spans: request, its first token in the batch, how many it has there, and the position of
                the first.

        Returns:
            ``(tokens of the batch, places in the ring of a layer)``.
        """
        source, dest = [], []
        for request, start, count, position in spans:
            row = request.row * self._ring_tokens
            for index in range(max(0, count - self._ring_tokens), count):
                source.append(start + index)
                dest.append(row + (position + index) % self._ring_tokens)
        return source, dest

    def keep_queries(self, layer: int, query: torch.Tensor, rows: QueryRows) -> None:
        """Keep queries of one layer, ``[tokens, query heads, head_dim]``."""
        if rows.source is not None:
            kept = query.index_select(0, rows.source)
        else:
            kept = query[: len(rows.dest)]
        self.state.ring[layer].flatten(0, 1).index_copy_(0, rows.dest, kept)

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
        self, steps: Sequence[BatchStep], number: int, observe: Observer | None = None
    ) -> None:
        """Everything between two forwards, enqueued on the current stream.

        Args:
            steps: what the step did to each request.
            number: of the step.
            observe: looks at what is wanted.
        """
        closing = [pair for step in steps for pair in self._close(step)]
        sparse = [step for step in steps if step.request.sparse]
        moving = [place for step in sparse for place in self._advance(step.request)]
        self._note_slots(moving, number)
        leaving = [(r.block_ids()[block], r.slots[slot]) for r, block, slot in moving]
        fills = [self._go_sparse(step.request, number) for step in steps if step.transition]
        # More than a step computes close at once where a cache in HBM had a prefix.
        first, last = closing[: -self._widths[-1]], closing[-self._widths[-1] :]
        for part in _parts(first, self._widths[-1]):
            self._run(part, [], [], [], number, None)
        self._run(last, leaving, sparse, fills, number, observe)

    def _run(
        self,
        closing: Sequence[tuple[int, int]],
        leaving: Sequence[tuple[int, int]],
        sparse: Sequence[BatchStep],
        fills: Sequence[list[int]],
        number: int,
        observe: Observer | None,
    ) -> None:
        width = self._width(max(len(closing), len(leaving)))
        taken = max((step.request.row + 1 for step in sparse), default=1)
        rows = next(count for count in self._row_counts if count >= taken)
        values = _columns(closing, width) + _columns(leaving, width)
        if sparse:
            values += self._meta(sparse, number, rows)
        if self.graphs is not None and observe is None:
            self.graphs.step(width, rows, values, fills)
            return
        work = StepWork.of(self.upload(values, torch.int32), width)
        transitions = [FirstFill.of(self.upload(fill, torch.int32)) for fill in fills]
        for layer in range(self._geometry.num_layers):
            self.state.run(layer, work, observe)
            for transition in transitions:
                self.state.first_fill(layer, transition)
            self._layer_done(layer)

    def _width(self, pairs: int) -> int:
        """The least width that takes them, so that graphs and kernels of few shapes are needed."""
        return next(width for width in self._widths if width >= pairs)

    def _close(self, step: BatchStep) -> list[tuple[int, int]]:
        """Pairs (engine's block, store block) of blocks that are full of accepted tokens now."""
        request = step.request
        size = self._geometry.block_tokens
        if request.first is None:
            request.first = step.start
        first = len(request.store_blocks)
        request.computed = step.computed
        end = request.computed // size
        if end == first:
            return []
        new, request.assigned = request.assigned[: end - first], request.assigned[end - first :]
        request.store_blocks += new
        self.state.digests.claim(new)
        self.state.store_index[request.row, first:end] = self.upload(new, torch.int32)
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
        rows, slots = self.upload([[r.row for r, _, _ in moving], [s for _, _, s in moving]])
        blocks = self.upload([b for _, b, _ in moving], torch.int32)
        self.state.resident[:, rows, :, slots] = blocks[:, None, None]
        self.state.last_wanted[:, rows, :, slots] = number

    def _go_sparse(self, request: BatchRequest, number: int) -> list[int]:
        """The transition of one request, but for what its layers do: ``FirstFill``'s values."""
        closed = request.computed // self._geometry.block_tokens
        request.sparse = True
        request.window_start = max(0, closed - self._config.window_blocks)
        request.num_sinks = min(self._config.sink_blocks, request.window_start)
        request.filled = min(len(request.slots), request.window_start - request.num_sinks)
        self.state.slots[request.row] = self.upload(request.slots, torch.int32)
        earliest = max(request.first or 0, request.computed - LATEST_QUERIES)
        places = [p % self._ring_tokens for p in range(earliest, request.computed)]
        return [
            request.row,
            number,
            request.filled,
            len(places),
            *[request.num_sinks] * LATEST_QUERIES,
            *[request.window_start] * LATEST_QUERIES,
            *_padded(places, LATEST_QUERIES),
            *_padded(request.block_ids(), self._most_blocks),
        ]

    def _meta(self, sparse: Sequence[BatchStep], number: int, rows: int) -> list[int]:
        """By row: first and end of the candidates, slots in use, query, step."""
        first, end, used, query = [0] * rows, [0] * rows, [0] * rows, [0] * rows
        for step in sparse:
            row = step.request.row
            first[row], end[row] = self._config.sink_blocks, step.request.window_start
            used[row] = step.request.filled
            query[row] = step.lookahead % self._ring_tokens
        return [*first, *end, *used, *query, *[number] * rows]

    def upload(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """Integers to the device, on the current stream."""
        if self._device.type != "cuda":
            return torch.tensor(values, dtype=dtype)
        # From pinned memory the host need not wait for the copy.
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(
            self._device, non_blocking=True
        )


def _columns(pairs: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Both columns, one after the other, each padded with -1."""
    return _padded([a for a, _ in pairs], width, -1) + _padded([b for _, b in pairs], width, -1)


def _parts(pairs: Sequence[tuple[int, int]], most: int) -> list[Sequence[tuple[int, int]]]:
    return [pairs[start : start + most] for start in range(0, len(pairs), most)]


def _padded(values: Sequence[int], width: int, filler: int = 0) -> list[int]:
    return [*values[:width], *[filler] * (width - len(values))]
