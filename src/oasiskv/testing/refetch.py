"""Evict half of the hot set before each step and fetch it again: the sparse path made exact."""

from collections.abc import Sequence
from typing import Protocol

import torch

from oasiskv.core.pipeline import LayerPlan, Pipeline
from oasiskv.core.request import TieredRequest
from oasiskv.core.residency import ResidentMap
from oasiskv.core.tiering import Tiering


class Host(Protocol):
    """What has a ``before_step`` hook: the reference engine, or the plugin's runtime."""

    step_number: int

    @property
    def running(self) -> Sequence[TieredRequest]:
        """Requests that have not ended."""
        ...

    @property
    def tiering(self) -> Tiering | None:
        """Between the tiers; None where all is dense."""
        ...


class ForcedRefetch:
    """A ``before_step`` hook.

    Before each step, for each sparse request, layer and head, a random half of the filled slots is
    overwritten with NaN and their blocks are fetched again from the store, without a cap and in a
    permuted order. With a hot set as large as the context the output must not change.

    Args:
        seed: which slots, and in which order.

    Attributes:
        fetched_bytes: bytes fetched so far.
        evicted_tiles: tiles evicted so far.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.fetched_bytes = 0
        self.evicted_tiles = 0

    def __call__(self, engine: Host) -> None:
        """Disturb all sparse requests of ``engine``."""
        for request in engine.running:
            residents, pipeline = request.residents, request.pipeline
            if engine.tiering is None or residents is None or pipeline is None:
                continue
            if residents.filled:
                for layer in range(pipeline.num_layers):
                    pipeline.consume(layer, engine.step_number)
                    plan = self._plan(residents, layer)
                    self._evict(request, plan, layer)
                    # No step of the engine is negative: no ticket of its own comes twice.
                    pipeline.predicted(layer, -engine.step_number)
                    self._fetch(engine.tiering, request, pipeline, plan, layer)

    def _plan(self, residents: ResidentMap, layer: int) -> LayerPlan:
        """Half of the slots of each head, and the same blocks for them in another order."""
        heads = residents.blocks.shape[1]
        count = (residents.filled + 1) // 2
        shuffled = torch.rand((heads, residents.filled), generator=self._generator).argsort(dim=-1)
        victims = shuffled[:, :count].to(residents.blocks.device)
        order = victims[:, torch.randperm(count, generator=self._generator)]
        last_wanted = residents.last_wanted[layer].clone()
        last_wanted.scatter_(-1, victims, residents.last_wanted[layer].gather(-1, order))
        return LayerPlan(residents.blocks[layer].gather(-1, order), victims, last_wanted)

    def _evict(self, request: TieredRequest, plan: LayerPlan, layer: int) -> None:
        tiles = request.kv.layer(layer)
        heads = torch.arange(plan.victims.shape[0], device=tiles.device)[:, None]
        tiles[request.kv.slot_index(plan.victims), heads] = float("nan")
        self.evicted_tiles += plan.num_tiles

    def _fetch(
        self,
        tiering: Tiering,
        request: TieredRequest,
        pipeline: Pipeline,
        plan: LayerPlan,
        layer: int,
    ) -> None:
        pipeline.planned(layer, plan)
        self.fetched_bytes += tiering.transfer(request, pipeline, layer, plan)
