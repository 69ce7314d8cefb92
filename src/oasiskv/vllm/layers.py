"""The sparse layers of one model in a worker: their store, their digests, their requests."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

from oasiskv.core.request import TieredRequest
from oasiskv.core.tiering import LATEST_QUERIES, Tiering
from oasiskv.drafts.lookahead import LookaheadMode, lookahead_row
from oasiskv.errors import TransferError
from oasiskv.ops.gather.reference import gather_tiles
from oasiskv.vllm import store
from oasiskv.vllm.logs import logger
from oasiskv.vllm.memory import PagedKV
from oasiskv.vllm.resume import keep_slots, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from oasiskv.config import OasisConfig
    from oasiskv.core.kept import KeptSlots
    from oasiskv.core.traffic import Traffic
    from oasiskv.vllm.messages import RequestMessage
    from oasiskv.vllm.shapes import ModelLayers


AGREEMENT_EVERY = 32
"""Sparse steps of a request between two measurements of agreement; each scores once more."""


@dataclass(eq=False, kw_only=True)
class WorkerRequest(TieredRequest):
    """One request in the layers of one model.

    Attributes:
        kv: its blocks.
        assigned: store blocks that the scheduler handed out and that no block has taken yet.
        failed: what the store owes it did not come: vLLM is asked to end it.
        queries: of this step, per layer and forward ``[tokens kept, query heads, head_dim]``. The
            target runs forward once in a step, a draft model once per draft, or not at all.
    """

    kv: PagedKV
    assigned: list[int] = field(default_factory=list)
    failed: bool = False
    queries: list[list[torch.Tensor]] = field(default_factory=list)

    def begin_step(self) -> None:
        """Forget the queries of the step before."""
        for kept in self.queries:
            kept.clear()

    def step_queries(self, forward: int) -> torch.Tensor:
        """Queries of one forward of the step, ``[layers, n, query heads, head_dim]``."""
        return torch.stack([kept[forward] for kept in self.queries])


class StepTokens(NamedTuple):
    """What one step did to one request.

    Attributes:
        start: tokens in place before it.
        scheduled: tokens that the target computed.
        drafts: of these, the drafts; the last ones.
        sampled: tokens that the sampler gave; none while the prompt is not complete.
    """

    start: int
    scheduled: int
    drafts: list[int]
    sampled: list[int]

    @property
    def fed(self) -> int:
        """Tokens that are no drafts."""
        return self.scheduled - len(self.drafts)

    @property
    def gained(self) -> int:
        """Tokens whose KV the target has put in place for good."""
        return self.fed + max(0, len(self.sampled) - 1)

    @property
    def computed(self) -> int:
        """Tokens in place after it."""
        return self.start + self.gained

    def computed_within(self, blocks: int, block_tokens: int) -> int:
        """Tokens in place after it that a request may count which has ``blocks`` store blocks.

        Drafts may be accepted past the request's last token: it ends with this step, and the
        scheduler has kept no room in the store for them.
        """
        return min(self.computed, (blocks + 1) * block_tokens - 1)

    def lookahead(self, mode: LookaheadMode) -> int:
        """Which of its tokens looks ahead.

        Those before the last token that is no draft were computed again. If none is sampled, more
        are to be.
        """
        if not self.sampled:
            return self.fed - 1
        return self.fed - 1 + lookahead_row(mode, self.drafts, self.sampled)


class SparseLayers:
    """Ties the layers of one model to the engine-neutral core.

    A draft model's layers are treated as the target's are: same blocks and slots, own tiles, own
    choice. What differs is which query looks ahead: a draft's own latest, which is the token it
    drafted last.

    Args:
        layers: names and sizes.
        config: our settings.
        caches: vLLM's KV tensor of each layer.
        capacity_blocks: blocks of the host store.
        block_ids: gives vLLM's blocks of a request, by its id.

    Attributes:
        digests: of the store's blocks.
        requests: by vLLM's request id.
        kept: what was in the slots of preempted ones that come back sparse.
        step_number: of the step that runs.
        unloaded: vLLM's blocks that could not be loaded in this step, being damaged in the store.
    """

    def __init__(
        self,
        layers: ModelLayers,
        config: OasisConfig,
        caches: Sequence[torch.Tensor],
        capacity_blocks: int,
        block_ids: Callable[[str], list[int]],
    ) -> None:
        self.geometry = layers.geometry
        self.is_draft = layers.is_draft
        self.caches = list(caches)
        self.index = {name: index for index, name in enumerate(layers.names)}
        self.store = store.MAKE_STORE(self.geometry, capacity_blocks, config.checksums)
        # What a draft model drafts last looks ahead: there is no query to compare that with.
        every = 0 if layers.is_draft else AGREEMENT_EVERY
        self.tiering = Tiering(self.geometry, config, self.store, self.caches[0].device, every)
        self.digests = self.tiering.digests
        self.requests: dict[str, WorkerRequest] = {}
        self.kept: dict[str, KeptSlots] = {}
        self.step_number = 0
        self.unloaded: set[int] = set()
        self._config = config
        self._block_ids = block_ids
        self._generations = count()
        self._damaged_logged = 0
        self._waited_s: float | None = None

    @property
    def running(self) -> list[WorkerRequest]:
        """Requests that go through the store and have neither ended nor failed."""
        return [request for request in self.requests.values() if not request.failed]

    def _admit(self, name: str) -> WorkerRequest:
        """A request goes through the store from now on."""
        block_ids = partial(self._block_ids, name)
        request = WorkerRequest(
            request_id=name,
            generation=next(self._generations),
            kv=PagedKV(self.geometry, self.caches, self._config.sink_blocks, block_ids),
            queries=[[] for _ in self.caches],
        )
        self.requests[name] = request
        return request

    def drop(self, name: str, keep: bool = False) -> None:
        """A request has ended or was preempted.

        Args:
            name: request id.
            keep: it comes back sparse: keep what is in its slots.
        """
        request = self.requests.pop(name, None)
        if not keep:
            self.kept.pop(name, None)
        if request is not None:
            self.tiering.collect()
            kept = keep_slots(request) if keep else None
            if kept is not None:
                self.kept[name] = kept
            request.ended = True
            self.tiering.release(request)

    def in_flight(self) -> set[str]:
        """Requests, dropped ones included, of which a write or a transfer is on its way."""
        self.tiering.collect()
        return self.tiering.in_flight

    def damaged_blocks(self) -> set[int]:
        """Store blocks that were found damaged and have not been written again."""
        checksums = self.store.checksums
        if checksums is None:
            return set()
        new = checksums.damaged_tiles - self._damaged_logged
        if new:
            logger.error("OasisKV: %d damaged tiles in the host store were not used", new)
            self._damaged_logged = checksums.damaged_tiles
        return set(checksums.damaged_blocks)

    def settle(self, names: Sequence[str]) -> None:
        """Wait for the transfers of these requests; one whose transfers do not come has failed."""
        start = time.perf_counter()
        self.tiering.collect()
        for name in names:
            request = self.requests[name]
            if request.pipeline is not None and not request.failed:
                with _failing(request):
                    self.tiering.settle(request, request.pipeline)
                self._waited_s = (self._waited_s or 0.0) + time.perf_counter() - start
                start = time.perf_counter()

    def traffic(self) -> Traffic:
        """Of all requests so far."""
        return self.tiering.traffic

    def take_waits(self) -> list[float]:
        """Seconds that this step waited for transfers; nothing if it had none to wait for."""
        waited, self._waited_s = self._waited_s, None
        return [] if waited is None else [waited]

    def before_attention(
        self, layer_name: str, name: str, query: torch.Tensor, most_drafts: int
    ) -> None:
        """A layer is about to attend for a request: its slots are read, its queries are kept.

        Args:
            layer_name: vLLM's name of the layer.
            name: request id.
            query: ``[tokens, query heads, head_dim]``.
            most_drafts: drafts that may be among the tokens, as the last ones.
        """
        request = self.requests.get(name)
        if request is None or request.failed:
            return
        layer = self.index[layer_name]
        # Of a dense request the latest, beside drafts that may be rejected.
        most = LATEST_QUERIES + most_drafts
        kept = query if request.residents is not None else query[-most:]
        request.queries[layer].append(kept.clone())
        if request.pipeline is not None:
            request.pipeline.consume(layer, self.step_number)

    def table(self, name: str, kv_tokens: int) -> tuple[torch.Tensor, int] | None:
        """The compact block table of a sparse request; None for one that is not.

        Args:
            name: request id.
            kv_tokens: tokens of the request, those of this step included.

        Returns:
            ``(int64 [blocks], tokens in them)``.
        """
        request = self.requests.get(name)
        if request is None or request.residents is None:
            return None
        return request.kv.table(kv_tokens, request.residents.filled)

    def after_step(
        self, steps: Mapping[str, tuple[StepTokens, bool]], observed: bool
    ) -> dict[str, torch.Tensor | None]:
        """Close blocks, go sparse, select and start transfers.

        Args:
            steps: by request id what the step did to it, and whether it is to go sparse if it is
                dense and its slots are there.
            observed: what is wanted is looked at.

        Returns:
            By request id what the next step wants, ``[layers, heads, K]``; None while dense or
            without candidates.
        """
        return {name: self._after_step(name, *step) for name, step in steps.items()}

    def window_start(self, name: str) -> int | None:
        """First block of the window of a sparse request; None for one that is not."""
        request = self.requests[name]
        return request.kv.window_start if request.residents is not None else None

    def take_news(self, name: str, news: RequestMessage) -> None:
        """The scheduler's news of a request of this step, which is admitted if it is new."""
        request = self.requests.get(name) or self._admit(name)
        self.tiering.adopt(request, news.store_blocks[: news.known])
        request.assigned.extend(news.store_blocks[news.known :])
        request.begin_step()
        if news.slots:
            request.kv.take_slots(news.slots)
        if news.resume_start:
            with _failing(request):
                resume(self, request, self.kept.pop(name, None), news.resume_start)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the store, before the forward that reads them.

        Args:
            pairs: store block and vLLM's block.
        """
        heads = self.geometry.num_kv_heads
        damaged = self.store.damaged_blocks([stored for stored, _ in pairs])
        self.unloaded = {block for stored, block in pairs if stored in damaged}
        both = torch.tensor(pairs, dtype=torch.int64).T[:, None].expand(2, heads, -1)
        for layer, cache in enumerate(self.caches):
            gather_tiles(self.store.layer(layer), both[0], cache, both[1])

    def stored(self, name: str) -> int:
        """Blocks of a request that the store holds."""
        request = self.requests[name]
        return next(i for i in count() if i not in request.acked)

    def _after_step(self, name: str, tokens: StepTokens, transition: bool) -> torch.Tensor | None:
        """Close blocks, go sparse, select and start transfers of one request."""
        request = self.requests[name]
        if request.failed:
            return None
        with _failing(request):
            return self._tier(request, tokens, transition)
        return None

    def _tier(
        self, request: WorkerRequest, tokens: StepTokens, transition: bool
    ) -> torch.Tensor | None:
        closable = len(request.store_blocks) + len(request.assigned)
        request.computed = tokens.computed_within(closable, self.geometry.block_tokens)
        forwards = len(request.queries[0])
        if not forwards:
            # vLLM does not draft near the end of the longest sequence: nobody wrote the draft's KV.
            request.kv.blank(tokens.start, tokens.computed)
        self.store.assigned = request.assigned
        self.tiering.close_blocks(request, self.step_number)
        if not forwards and request.residents is not None:
            self.tiering.advance(request, request.residents, self.step_number)
            return None
        queries, row = self._lookahead(request, tokens, forwards)
        transition = transition and len(request.kv.slots) > 0
        selection = self.tiering.after_step(request, queries, row, transition, self.step_number)
        return None if selection is None else selection.wanted

    def _lookahead(
        self, request: WorkerRequest, tokens: StepTokens, forwards: int
    ) -> tuple[torch.Tensor, int]:
        """Queries of the step, and which of them looks ahead."""
        if not forwards:
            geometry = self.geometry
            shape = (geometry.num_layers, 0, geometry.num_query_heads, geometry.head_dim)
            return self.caches[0].new_empty(shape), 0
        if request.residents is None:
            queries = request.step_queries(0)
            rejected = 0 if self.is_draft else tokens.scheduled - tokens.gained
            return queries[:, : queries.shape[1] - rejected], 0
        if self.is_draft:
            queries = request.step_queries(-1)
            return queries, queries.shape[1] - 1
        return request.step_queries(0), tokens.lookahead(self._config.lookahead)


@contextmanager
def _failing(request: WorkerRequest) -> Iterator[None]:
    """A ``TransferError`` inside is the end of this request, and of no other."""
    try:
        yield
    except TransferError as error:
        request.failed = True
        logger.error("OasisKV: request %s ends with an error: %s", request.request_id, error)
