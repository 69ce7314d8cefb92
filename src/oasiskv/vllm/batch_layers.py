"""The target's sparse layers in a worker, all requests at once: for CUDA."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from oasiskv.core.batch import BatchRequest, BatchStep, BatchTiering, QueryRows
from oasiskv.core.batch_limits import BatchLimits
from oasiskv.core.batch_traffic import BatchTraffic, OverrunClock
from oasiskv.vllm.store import AssignedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from oasiskv.config import OasisConfig
    from oasiskv.core.kept import KeptSlots
    from oasiskv.core.traffic import Traffic
    from oasiskv.vllm.layers import StepTokens
    from oasiskv.vllm.messages import RequestMessage
    from oasiskv.vllm.shapes import ModelLayers


class CompactTables(NamedTuple):
    """Block tables of the sparse requests of a forward.

    Attributes:
        rows: int64 ``[n]``, their rows of the batch.
        tables: int32 ``[n, blocks]``: sink, filled slots, window; padded with anything.
        kv_tokens: int32 ``[n]``, tokens in them.
        longest: most tokens that any row of the batch attends to.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    kv_tokens: torch.Tensor
    longest: int


class BatchLayers:
    """Does what ``SparseLayers`` does, for all requests of a step at once and on a stream aside.

    Args:
        layers: names and sizes.
        config: our settings.
        caches: vLLM's KV tensor of each layer.
        capacity_blocks: blocks of the host store.
        block_ids: gives vLLM's blocks of a request, by its id.
        computed_before: gives the tokens of a request that were in place before this step.
        limits: what the state of all requests is sized by.
        graph_tokens: most tokens of a forward that vLLM captures as a graph, with its attention.

    Attributes:
        digests: of the store's blocks.
        requests: by vLLM's request id.
        kept: what was in the slots of preempted ones that come back sparse.
        step_number: of the step that runs.
    """

    def __init__(
        self,
        layers: ModelLayers,
        config: OasisConfig,
        caches: Sequence[torch.Tensor],
        capacity_blocks: int,
        block_ids: Callable[[str], list[int]],
        computed_before: Callable[[str], int],
        limits: BatchLimits,
        graph_tokens: int = 0,
    ) -> None:
        self.geometry = layers.geometry
        self.caches = list(caches)
        self.index = {name: index for index, name in enumerate(layers.names)}
        self._memory_of = dict(self.index)
        self.store = AssignedStore(self.geometry, capacity_blocks)
        device = self.caches[0].device
        # External: recorded within one graph, waited for within another or outside.
        self._aside: torch.cuda.Stream | None = None
        self._done: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._done = [
                torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                for _ in self.caches
            ]
        with torch.cuda.stream(self._aside):
            self.tiering = BatchTiering(
                self.geometry, config, self.store, self.caches, limits, self._layer_done
            )
        # A graph reads where each of its queries goes from here.
        self._places = torch.zeros(graph_tokens, dtype=torch.int64, device=device)
        self.digests = self.tiering.state.digests
        self.requests: dict[str, BatchRequest] = {}
        self.kept: dict[str, KeptSlots] = {}
        self.step_number = 0
        self._traffic = BatchTraffic(self.tiering.state, self.geometry, config)
        self._clock = OverrunClock()
        self._config = config
        self._block_ids = block_ids
        self._computed_before = computed_before

    def take_news(self, name: str, news: RequestMessage) -> None:
        """The scheduler's news of a request of this step, which is admitted if it is new."""
        request = self.requests.get(name)
        if request is None:
            request = self.tiering.admit(name, partial(self._block_ids, name))
            self.requests[name] = request
        if news.known:
            # The row may still be read for the request that had it before.
            self._wait_aside()
        self.tiering.adopt(request, news.store_blocks[: news.known])
        request.assigned.extend(news.store_blocks[news.known :])
        if news.slots:
            request.slots = list(news.slots)
        if news.resume_start:
            self.tiering.resume(request, self.kept.pop(name))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the store, before the forward that reads them.

        Args:
            pairs: store block and vLLM's block.
        """
        # What runs there may be about to write what is read here, and still read what is written.
        self._wait_aside()
        self.tiering.load(pairs)

    def stored(self, name: str) -> int:
        """Blocks of a request that the store holds, or will before anything else is done to it."""
        return len(self.requests[name].store_blocks)

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
            if keep and request.sparse:
                self._wait_aside()
                self.kept[name] = self.tiering.keep_slots(request)
            self.tiering.release(request)

    def settle(self, names: Sequence[str]) -> None:
        """Nothing to wait for on the host: layers wait on their stream."""
        self._clock.forward_starts()

    def traffic(self) -> Traffic:
        """Of all requests so far; what the device counts may be some steps old."""
        return self._traffic.total()

    def count_step(self, sparse: Collection[str]) -> None:
        """These have selected; called on the stream on which they did."""
        self._traffic.add_step(self.requests[name] for name in sparse)

    def take_waits(self) -> list[float]:
        """Seconds that transfers ran on into a forward, of the steps measured since."""
        return self._clock.take()

    def query_rows(self, names: Sequence[str], starts: Sequence[int], tokens: int) -> QueryRows:
        """Which queries of a forward are kept.

        Args:
            names: request id of each row.
            starts: first token of each row, and the total.
            tokens: of the forward, those that only fill it up included.
        """
        spans = [
            (self.requests[name], start, stop - start, self._computed_before(name))
            for name, start, stop in zip(names, starts, starts[1:], strict=False)
            if name in self.requests
        ]
        source, dest = self.tiering.query_places(spans)
        if tokens > len(self._places):
            both = self.tiering.upload([source, dest], torch.int64)
            return QueryRows(both[0], both[1])
        places = [self.tiering.unneeded_place] * tokens
        for token, place in zip(source, dest, strict=True):
            places[token] = place
        self._places[:tokens] = self.tiering.upload(places)
        return QueryRows(None, self._places[:tokens])

    def keep_queries(self, layer_name: str, query: torch.Tensor, rows: QueryRows) -> None:
        """Keep queries of one layer, ``[tokens, query heads, head_dim]``, for the next step."""
        self.tiering.keep_queries(self.index[layer_name], query, rows)

    def wait(self, layer_name: str) -> None:
        """A layer is about to write its KV: what runs aside must be done with its tensors."""
        layer = self._memory_of.get(layer_name)
        if self._done and layer is not None:
            torch.cuda.current_stream().wait_event(self._done[layer])

    def share_with(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Let layers of other groups, whose blocks lie in the memory of ours, wait as ours do.

        Args:
            kv_caches: vLLM's KV tensor of each layer of the model.
        """
        starts = {cache.data_ptr(): layer for layer, cache in enumerate(self.caches)}
        self._memory_of = {
            name: starts[cache.data_ptr()]
            for name, cache in kv_caches.items()
            if cache.data_ptr() in starts
        }

    def before_attention(
        self, layer_name: str, name: str, query: torch.Tensor, most_drafts: int
    ) -> None:
        """``keep_queries`` for one request, on the CPU, where nothing runs aside."""
        rows = self.query_rows([name], [0, len(query)], len(query))
        self.keep_queries(layer_name, query, rows)

    def table(self, name: str, kv_tokens: int) -> tuple[torch.Tensor, int] | None:
        """The compact block table of a sparse request; None for one that is not.

        Args:
            name: request id.
            kv_tokens: tokens of the request, those of this step included.

        Returns:
            ``(int64 [blocks], tokens in them)``, on the host.
        """
        request = self.requests.get(name)
        if request is None or not request.sparse:
            return None
        table, tokens = self.tiering.table(request, kv_tokens)
        return torch.tensor(table, dtype=torch.int64), tokens

    def compact(self, names: Sequence[str], starts: Sequence[int]) -> CompactTables | None:
        """Compact block tables of the sparse requests of a forward; None where all are dense.

        Args:
            names: request id of each row.
            starts: first token of each row, and the total.
        """
        rows, tables, lengths, longest = [], [], [], 0
        for row, name in enumerate(names):
            tokens = self._computed_before(name) + starts[row + 1] - starts[row]
            request = self.requests.get(name)
            if request is not None and request.sparse:
                table, tokens = self.tiering.table(request, tokens)
                rows.append(row)
                tables.append(table)
                lengths.append(tokens)
            longest = max(longest, tokens)
        if not rows:
            return None
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        upload = self.tiering.upload
        return CompactTables(
            rows=upload(rows),
            tables=upload(padded, torch.int32),
            kv_tokens=upload(lengths, torch.int32),
            longest=longest,
        )

    def after_step(
        self, steps: Mapping[str, tuple[StepTokens, bool]], observed: bool
    ) -> dict[str, torch.Tensor | None]:
        """Close blocks, go sparse, select and start transfers.

        Args:
            steps: by request id what the step did to it, and whether it is to go sparse if it is
                dense and its slots are there.
            observed: what is wanted is looked at, which the host then waits for.

        Returns:
            By request id what the next step wants, ``[layers, heads, K]``; None while dense or
            without candidates, or not observed.
        """
        batch = [self._batch_step(name, *step) for name, step in steps.items()]
        sparse = {name for name in steps if self.requests[name].sparse}
        wanted: list[torch.Tensor] = []
        if self._aside is None:
            self._run(batch, wanted if observed else None)
            self.count_step(sparse)
        else:
            self._wait_forward(self._aside)
            with torch.cuda.stream(self._aside):
                self._run(batch, wanted if observed else None)
                self.count_step(sparse)
                if sparse:
                    self._clock.transfers_end()
            if observed:
                self._aside.synchronize()
        found = torch.stack(wanted).cpu() if wanted else None
        return {name: self._wanted(name, found if name in sparse else None) for name in steps}

    def window_start(self, name: str) -> int | None:
        """First block of the window of a sparse request; None for one that is not."""
        request = self.requests[name]
        return request.window_start if request.sparse else None

    def _wait_forward(self, aside: torch.cuda.Stream) -> None:
        """What runs aside reads the KV and the queries of the forward."""
        aside.wait_stream(torch.cuda.current_stream())

    def _wait_aside(self) -> None:
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)

    def _run(self, batch: list[BatchStep], wanted: list[torch.Tensor] | None) -> None:
        observe = None if wanted is None else lambda _, blocks: wanted.append(blocks)
        self.tiering.after_step(batch, self.step_number, observe)

    def _layer_done(self, layer: int) -> None:
        if self._done:
            self._done[layer].record()

    def _batch_step(self, name: str, tokens: StepTokens, transition: bool) -> BatchStep:
        request = self.requests[name]
        closable = len(request.store_blocks) + len(request.assigned)
        row = tokens.lookahead(self._config.lookahead)
        return BatchStep(
            request,
            tokens.start,
            tokens.computed_within(closable, self.geometry.block_tokens),
            lookahead=tokens.start + row,
            transition=transition and not request.sparse and bool(request.slots),
        )

    def _wanted(self, name: str, found: torch.Tensor | None) -> torch.Tensor | None:
        request = self.requests[name]
        if found is None or request.window_start <= self._config.sink_blocks:
            return None
        return found[:, request.row]
