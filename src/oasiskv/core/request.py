"""What tiering knows of a request, whatever the engine; and what it measures on the way."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from oasiskv.core.pipeline import Pipeline
from oasiskv.core.residency import ResidentMap
from oasiskv.errors import StateError
from oasiskv.stores.base import Ticket


class KVMemory(Protocol):
    """Fast-tier memory of one request, in the engine's own blocks.

    Attributes:
        window_start: first block of the window; 0 while dense.
    """

    window_start: int

    @property
    def nbytes(self) -> int:
        """Bytes that the request holds in the fast tier."""
        ...

    def tiles(self, first: int, end: int) -> torch.Tensor:
        """A copy of blocks ``first..end-1``, which are dense or in the window.

        Returns:
            ``[end - first, layers, heads, block_tokens, 2 * head_dim]``.
        """
        ...

    def layer(self, layer: int) -> torch.Tensor:
        """Blocks of one sparse layer, ``[blocks, heads, block_tokens, 2 * head_dim]``."""
        ...

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Index into ``layer``'s blocks of each slot, int64 of any shape; -1 stays -1."""
        ...

    def go_sparse(self, chosen: torch.Tensor, num_sinks: int, start: int, end: int) -> None:
        """The transition: fill the first slots and keep sink, slots and window only.

        Args:
            chosen: int64 ``[layers, heads, n]`` blocks for slots 0..n-1.
            num_sinks: blocks of the sink.
            start: first block of the window.
            end: one past the last block that holds a token.
        """
        ...

    def advance(self, start: int, residents: ResidentMap, step: int) -> None:
        """Move the window on: a leaving block goes to the sink, to a free slot, or away.

        Args:
            start: new first block of the window; the leaving blocks are in the store.
            residents: the resident map; takes the leaving blocks while it has free slots.
            step: the step that asks.
        """
        ...

    def drop(self) -> None:
        """The request has ended: give everything back."""
        ...


class StepTraffic(NamedTuple):
    """What one sparse step wanted and moved.

    Attributes:
        step: the engine's step.
        fetched_bytes: bytes store -> slots.
        wanted: wanted blocks, over layers and heads.
        misses: int64 ``[layers]`` wanted blocks that were in no slot, before the cap.
        fetched: fetched blocks, over layers and heads.
    """

    step: int
    fetched_bytes: int
    wanted: int
    misses: torch.Tensor
    fetched: int


@dataclass
class RequestStats:
    """Measurements of one request.

    Attributes:
        traffic: one entry per step that planned a swap.
        agreement: share of the blocks predicted for a step that the step's own query would have
            chosen; one entry per sampled step.
        accepted: tokens gained in each decode step, drafts and sampled token.
        dense_kv_bytes: KV bytes in the fast tier just before the transition, from storages.
        final_kv_bytes: KV bytes in the fast tier when the request ended, from storages.
    """

    traffic: list[StepTraffic] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    dense_kv_bytes: int = 0
    final_kv_bytes: int = 0


@dataclass(eq=False, kw_only=True)
class TieredRequest:
    """State of one request between the tiers.

    Attributes:
        request_id: the caller's name for it.
        generation: tells this life of the request id from others.
        kv: fast-tier memory.
        computed: tokens whose KV is in place.
        ended: finished, failed or aborted.
        store_blocks: store block of each closed block, in order.
        writes: writes on their way -> the blocks that they carry.
        acked: blocks that the store has acknowledged.
        residents: resident map, once sparse.
        pipeline: transfers, once sparse.
        predicted: mask ``[layers, heads, blocks]`` of the last prediction.
        recent_queries: the latest queries while dense, ``[layers, n, query heads, head_dim]``.
        stats: measurements.
    """

    request_id: str
    generation: int
    kv: KVMemory
    computed: int = 0
    ended: bool = False
    store_blocks: list[int] = field(default_factory=list)
    writes: dict[Ticket, range] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    residents: ResidentMap | None = None
    pipeline: Pipeline | None = None
    predicted: torch.Tensor | None = None
    recent_queries: torch.Tensor | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    _store_index: torch.Tensor | None = field(default=None, init=False, repr=False)

    def store_index(self, device: torch.device) -> torch.Tensor:
        """``store_blocks`` as int64 ``[closed blocks]``, made anew only when there are more."""
        if self._store_index is None or len(self._store_index) != len(self.store_blocks):
            self._store_index = torch.tensor(self.store_blocks, dtype=torch.int64, device=device)
        return self._store_index

    def remember(self, queries: torch.Tensor, most: int) -> None:
        """Keep the ``most`` latest of all queries seen, ``queries`` being the newest."""
        if self.recent_queries is not None:
            queries = torch.cat((self.recent_queries, queries), dim=1)
        self.recent_queries = queries[:, -most:]

    def latest_queries(self) -> torch.Tensor:
        """Hand over the queries kept, for the transition; the request keeps none from here on."""
        if self.recent_queries is None:
            raise StateError(f"request {self.request_id} has kept no queries")
        queries, self.recent_queries = self.recent_queries, None
        return queries

    @property
    def outstanding(self) -> set[Ticket]:
        """Writes and transfers on their way."""
        return set(self.writes) | set(self.pipeline.waiting() if self.pipeline else ())
