"""One request of the reference engine, and what it measures on its way."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from oasiskv.core.pipeline import Pipeline
from oasiskv.core.residency import ResidentMap
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import OasisError, StateError
from oasiskv.hf.memory import RequestKV
from oasiskv.stores.base import Ticket


class Phase(Enum):
    """Where a request stands."""

    PREFILL = "prefill"
    DENSE = "dense"
    SPARSE = "sparse"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def running(self) -> bool:
        """The engine still computes for it."""
        return self in (Phase.PREFILL, Phase.DENSE, Phase.SPARSE)


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


@dataclass(eq=False)
class Request:
    """State of one request.

    Attributes:
        request_id: the caller's name for it.
        generation: tells this life of the request id from others.
        prompt: token ids.
        forced: token ids that are decoded instead of sampled ones, for teacher forcing.
        max_new_tokens: most tokens to decode, the forced ones included.
        sampling: how tokens are chosen.
        generator: its source of randomness; None when greedy.
        kv: fast-tier memory; None once the request has ended.
        output: decoded tokens.
        computed: tokens whose KV is in place; all but the last token once decoding.
        store_blocks: store block of each closed block, in order.
        acked: how many leading blocks the store has acknowledged.
        writes: writes on their way -> one past their last block.
        residents: resident map, once sparse.
        pipeline: transfers, once sparse.
        predicted: mask ``[layers, heads, blocks]`` of the last prediction, when agreement is
            measured.
        recent_queries: the latest queries while dense, ``[layers, n, query heads, head_dim]``.
        error: why it failed.
    """

    request_id: str
    generation: int
    prompt: list[int]
    forced: list[int]
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator | None
    kv: RequestKV
    phase: Phase = Phase.PREFILL
    output: list[int] = field(default_factory=list)
    computed: int = 0
    store_blocks: list[int] = field(default_factory=list)
    writes: dict[Ticket, range] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    residents: ResidentMap | None = None
    pipeline: Pipeline | None = None
    predicted: torch.Tensor | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    recent_queries: torch.Tensor | None = None
    error: OasisError | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

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
