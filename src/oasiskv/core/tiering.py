"""Moves blocks between the fast tier and the store, whatever the engine."""

import time
from collections.abc import Callable, Sequence

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.pipeline import LayerPlan, Pipeline
from oasiskv.core.request import StepTraffic, TieredRequest
from oasiskv.core.residency import ResidentMap
from oasiskv.core.selection import Selection, Selector, top_blocks
from oasiskv.core.traffic import Traffic
from oasiskv.errors import TransferError
from oasiskv.stores.base import Store, Ticket

LATEST_QUERIES = 16
"""Queries that choose the first hot set at the transition."""


class Tiering:
    """Write-through, transition, window, selection and transfers of all requests.

    Args:
        geometry: KV sizes of the layers that go sparse.
        config: settings.
        store: where closed blocks go.
        device: where attention runs.
        agreement_every: measure prediction agreement every so many sparse steps; 0: never.

    Attributes:
        traffic: of all requests so far.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        config: OasisConfig,
        store: Store,
        device: torch.device,
        agreement_every: int = 0,
    ) -> None:
        self._agreement_every = agreement_every
        self._geometry = geometry
        self._device = device
        self._config = config
        self.store = store
        self.digests = DigestPool(
            geometry, store.capacity_blocks, config.digest, config.minmax_mix, device
        )
        self.selector = Selector(config, geometry, self.digests, geometry.head_dim**-0.5)
        self._owners: dict[tuple[str, int], TieredRequest] = {}
        self.ignored = 0
        self.traffic = Traffic()

    @property
    def draining(self) -> int:
        """Ended requests whose store blocks still wait for a completion."""
        return sum(request.ended for request in self._owners.values())

    @property
    def in_flight(self) -> set[str]:
        """Requests, ended ones included, of which a write or a transfer is on its way."""
        return {owner.request_id for owner in self._owners.values() if owner.outstanding}

    def adopt(self, request: TieredRequest, blocks: Sequence[int]) -> None:
        """A request that has just started finds its first blocks in the store, with their digests.

        Args:
            request: no block of it has closed.
            blocks: store blocks, in order; the caller has taken them.
        """
        if not blocks:
            return
        request.store_blocks = list(blocks)
        request.acked.update(range(len(blocks)))
        self._owners[request.request_id, request.generation] = request
        self.digests.claim(blocks)

    def close_blocks(self, request: TieredRequest, step: int) -> None:
        """Write blocks that are full of accepted tokens through to the store; build digests.

        Raises:
            StoreFullError: the store has no room; nothing was written.
        """
        first = len(request.store_blocks)
        end = request.computed // self._geometry.block_tokens
        if end == first:
            return
        blocks = self.store.reserve(end - first)
        request.store_blocks.extend(blocks)
        self._owners[request.request_id, request.generation] = request
        tiles = request.kv.tiles(first, end)
        self.digests.build(blocks, tiles)
        ticket = Ticket("write", request.request_id, request.generation, step)
        request.writes[ticket] = range(first, end)
        self.store.write(ticket, blocks, tiles)
        self.collect()

    def after_step(
        self,
        request: TieredRequest,
        queries: torch.Tensor,
        lookahead_row: int,
        transition: bool,
        step: int,
    ) -> Selection | None:
        """Everything between two forwards of a request whose closed blocks are written.

        Args:
            request: ``computed`` counts this step's tokens.
            queries: of the step's tokens, ``[layers, n, query heads, head_dim]``; of a dense
                request only those of accepted tokens.
            lookahead_row: which of them predicts the next step, once sparse.
            transition: a dense request is to go sparse now.
            step: the step that has just run.

        Returns:
            What the next step wants; None while dense or without candidates.

        Raises:
            TransferError: the store did not acknowledge blocks that would leave.
        """
        residents, pipeline = request.residents, request.pipeline
        if residents is None or pipeline is None:
            request.remember(queries, LATEST_QUERIES)
            if transition:
                self.go_sparse(request, request.latest_queries(), step)
            return None
        self._measure_agreement(request, queries)
        self.advance(request, residents, step)
        row = slice(lookahead_row, lookahead_row + 1)
        return self.select(request, residents, pipeline, queries[:, row], step)

    def go_sparse(self, request: TieredRequest, queries: torch.Tensor, step: int) -> None:
        """The transition of one request.

        Args:
            request: a dense request whose closed blocks are written.
            queries: its latest queries, ``[layers, n, query heads, head_dim]``.
            step: the step that has just run.

        Raises:
            TransferError: the store did not acknowledge the blocks that would leave.
        """
        size = self._geometry.block_tokens
        start = max(0, request.computed // size - self._config.window_blocks)
        sinks = min(self._config.sink_blocks, start)
        self._await_acks(request, start)
        residents = ResidentMap(self._geometry, self._config.hot_blocks, self._device)
        candidates = request.store_index(self._device)[sinks:start]
        if len(candidates):
            scores = self.selector.score(queries, candidates)
            blocks, wanted = self.selector.first_fill(scores, residents.num_slots)
            residents.fill(blocks, wanted, step)
        request.stats.dense_kv_bytes = request.kv.nbytes
        chosen = residents.blocks[..., : residents.filled]
        request.kv.go_sparse(chosen, sinks, start, self._geometry.blocks_for(request.computed))
        request.residents = residents
        request.pipeline = Pipeline(
            request.request_id, request.generation, self._geometry.num_layers
        )

    def advance(self, request: TieredRequest, residents: ResidentMap, step: int) -> None:
        """Let blocks that are no longer recent leave the window.

        Raises:
            TransferError: the store did not acknowledge a block that would leave.
        """
        start = request.computed // self._geometry.block_tokens - self._config.window_blocks
        if start > request.kv.window_start:
            self._await_acks(request, start)
            request.kv.advance(start, residents, step)

    def candidates(self, request: TieredRequest) -> torch.Tensor:
        """Store blocks of the request's blocks between sink and window: int64 ``[n]``."""
        return request.store_index(self._device)[self._config.sink_blocks : request.kv.window_start]

    def select(
        self,
        request: TieredRequest,
        residents: ResidentMap,
        pipeline: Pipeline,
        queries: torch.Tensor,
        step: int,
    ) -> Selection | None:
        """Predict what the next step wants and start to fetch what is missing.

        Args:
            request: a sparse request.
            residents: its resident map.
            pipeline: its transfers.
            queries: lookahead queries, ``[layers, n, query heads, head_dim]``.
            step: the step that has just run.

        Returns:
            What was selected, or None while there is nothing between sink and window.
        """
        candidates = self.candidates(request)
        if not len(candidates):
            return None
        for layer in range(self._geometry.num_layers):
            pipeline.predicted(layer, step)
        scores = self.selector.score(queries, candidates)
        request.predicted = top_blocks(scores, self._config.budget_blocks)
        selection = self.selector.plan(scores, residents, step)
        moved = 0
        for layer, plan in enumerate(selection.layers):
            pipeline.planned(layer, plan)
            if plan.num_tiles:
                moved += self.transfer(request, pipeline, layer, plan)
            else:
                _commit(residents, layer, pipeline.settle(layer))
        traffic = StepTraffic(
            step=step,
            fetched_bytes=moved,
            wanted=int((selection.wanted >= 0).sum()),
            misses=selection.misses.sum(dim=-1).cpu(),
            fetched=sum(plan.num_tiles for plan in selection.layers),
        )
        request.stats.traffic.append(traffic)
        self.traffic += Traffic(
            wanted_tiles=traffic.wanted,
            missed_tiles=int(traffic.misses.sum()),
            fetched_tiles=traffic.fetched,
            fetched_bytes=moved,
            cap_bytes=self._config.cap_blocks * self._geometry.block_bytes,
        )
        return selection

    def transfer(
        self, request: TieredRequest, pipeline: Pipeline, layer: int, plan: LayerPlan
    ) -> int:
        """Start to carry out the swap plan of one layer, which is planned in ``pipeline``.

        Returns:
            Bytes that it moves.
        """
        ticket = pipeline.launch(layer)
        store_blocks = request.store_index(self._device)[plan.sources.clamp(min=0)]
        sources = torch.where(plan.sources >= 0, store_blocks, -1)
        slots = request.kv.slot_index(plan.victims)
        return self.store.read(ticket, sources, request.kv.layer(layer), slots)

    def settle(self, request: TieredRequest, pipeline: Pipeline) -> None:
        """Wait for the transfers of the last step: a slot being written must not be read.

        Raises:
            TransferError: one did not complete in time.
        """
        self._await(lambda: not pipeline.waiting(), f"transfers of request {request.request_id}")

    def collect(self, timeout_s: float = 0.0) -> None:
        """Take over completions; those that match nothing change nothing."""
        for ticket in self.store.poll(timeout_s):
            damaged = self.store.damaged(ticket)
            owner = self._owners.get((ticket.request_id, ticket.generation))
            if owner is None or ticket not in owner.outstanding:
                self.ignored += 1
                continue
            if ticket.kind == "write":
                owner.acked.update(owner.writes.pop(ticket))
            elif owner.pipeline is not None and owner.residents is not None:
                plan = owner.pipeline.complete(ticket)
                if plan is not None:
                    whole = plan if damaged is None else plan.without(damaged)
                    _commit(owner.residents, ticket.layer, whole)
            if owner.ended and not owner.outstanding:
                self._give_back(owner)

    def release(self, request: TieredRequest) -> None:
        """Give back what an ended request holds; its store blocks once nothing is on its way."""
        request.kv.drop()
        self.collect()
        owned = (request.request_id, request.generation) in self._owners
        if owned and not request.outstanding:
            self._give_back(request)

    def drain(self, request: TieredRequest | None = None) -> None:
        """Wait until an ended request, or every ended one, holds no store blocks any more.

        Raises:
            TransferError: a completion did not come in time.
        """
        if request is None:
            self._await(lambda: not self.draining, "transfers of ended requests")
        else:
            self._await(
                lambda: not request.store_blocks, f"transfers of request {request.request_id}"
            )

    def _measure_agreement(self, request: TieredRequest, queries: torch.Tensor) -> None:
        """Compare what was predicted for this step with what its own query would have chosen."""
        predicted = request.predicted
        if predicted is None or not self._agreement_every:
            return
        if (len(request.stats.traffic) - 1) % self._agreement_every:
            return
        store_blocks = self.candidates(request)[: predicted.shape[-1]]
        scores = self.selector.score(queries[:, :1], store_blocks)
        actual = top_blocks(scores, self._config.budget_blocks)
        compared, agreeing = int(actual.sum()), int((actual & predicted).sum())
        request.stats.agreement.append(agreeing / compared)
        self.traffic += Traffic(compared_tiles=compared, agreeing_tiles=agreeing)

    def _await_acks(self, request: TieredRequest, blocks: int) -> None:
        self._await(
            lambda: request.acked.issuperset(range(blocks)),
            f"writes of blocks below {blocks} of request {request.request_id}",
        )

    def _await(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._config.transfer_timeout_s
        self.collect()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(
                    f"{what} did not complete within transfer_timeout_s="
                    f"{self._config.transfer_timeout_s}; the store is stalled or has lost them"
                )
            self.collect(left)

    def _give_back(self, request: TieredRequest) -> None:
        del self._owners[request.request_id, request.generation]
        self.digests.release(request.store_blocks)
        self.store.free(request.store_blocks)
        request.store_blocks = []


def _commit(residents: ResidentMap, layer: int, plan: LayerPlan) -> None:
    residents.commit(layer, plan.sources, plan.victims, plan.last_wanted)
