"""From lookahead queries to wanted blocks and a swap plan, for all layers of one request."""

from dataclasses import dataclass

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.pipeline import LayerPlan
from oasiskv.core.residency import ResidentMap
from oasiskv.ops.plan.reference import Plan, make_plan
from oasiskv.ops.score.reference import block_scores


@dataclass(frozen=True)
class Selection:
    """What one step wants, and what of it is missing.

    Args:
        wanted: int64 ``[layers, heads, K]`` blocks of the request, best first, -1 padded.
        misses: int64 ``[layers, heads]`` wanted blocks that were in no slot.
        layers: the swap plan of each layer.
    """

    wanted: torch.Tensor
    misses: torch.Tensor
    layers: list[LayerPlan]


class Selector:
    """Scores the candidate blocks of a request and plans its swaps.

    Args:
        config: budget, cap and hysteresis.
        geometry: heads of the model.
        digests: digest pool of the store that holds the blocks.
        scale: softmax scale of the model's attention.
    """

    def __init__(
        self, config: OasisConfig, geometry: KVGeometry, digests: DigestPool, scale: float
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._digests = digests
        self._scale = scale

    def score(self, queries: torch.Tensor, store_blocks: torch.Tensor) -> torch.Tensor:
        """Expected share of attention of each candidate block.

        Args:
            queries: lookahead queries, ``[layers, n, query heads, head_dim]``.
            store_blocks: int64 ``[blocks]``, store blocks of the candidates, in order.

        Returns:
            ``[layers, heads, blocks]`` float32.
        """
        logits = self._digests.logits(queries, store_blocks, self._scale)
        candidates = logits.new_ones((logits.shape[0], logits.shape[-1]), dtype=torch.bool)
        return block_scores(logits, candidates, self._geometry.num_kv_heads)

    def plan(self, scores: torch.Tensor, residents: ResidentMap, step: int) -> Selection:
        """Wanted blocks and swap plans.

        Args:
            scores: ``[layers, heads, blocks]`` of the candidates, which start after the sink.
            residents: the resident map; read only.
            step: the step that asks.
        """
        first = self._config.sink_blocks
        filled = residents.filled
        plan = make_plan(
            scores,
            scores.new_ones((scores.shape[0], scores.shape[-1]), dtype=torch.bool),
            residents.blocks[..., :filled] - first,
            residents.last_wanted[..., :filled],
            budget=self._config.budget_blocks,
            cap=self._config.cap_blocks,
            hysteresis=self._config.hysteresis,
            step=step,
        )
        return Selection(
            wanted=_shift(plan.wanted, first),
            misses=plan.misses,
            layers=self._layer_plans(plan, residents),
        )

    def first_fill(self, scores: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks for the empty slots at the transition.

        Args:
            scores: ``[layers, heads, blocks]`` of the candidates.
            slots: slots there are.

        Returns:
            ``(blocks, wanted)``: int64 and bool ``[layers, heads, min(slots, blocks)]``, the least
            wanted first, so that among equally old slots the worst block is evicted first.
        """
        best, wanted = least_wanted_first(scores, slots, self._config.budget_blocks)
        return best + self._config.sink_blocks, wanted

    def _layer_plans(self, plan: Plan, residents: ResidentMap) -> list[LayerPlan]:
        sources = _shift(plan.sources, self._config.sink_blocks)
        last_wanted = residents.last_wanted.clone()
        last_wanted[..., : residents.filled] = plan.last_wanted
        return [
            LayerPlan(sources[layer], plan.victims[layer], last_wanted[layer])
            for layer in range(sources.shape[0])
        ]


def least_wanted_first(
    scores: torch.Tensor, slots: int, budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best blocks, the worst of them first; ties to the lower index.

    Args:
        scores: ``[..., blocks]``.
        slots: how many there are to be.
        budget: how many of them are wanted.

    Returns:
        Index of each among the scores, and which are wanted: int64 and bool
        ``[..., min(slots, blocks)]``.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    rank = torch.arange(order.shape[-1], device=order.device)
    return order.flip(-1), (rank < budget).expand_as(order).flip(-1)


def top_blocks(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Mask of the ``budget`` best blocks, ties to the lower index: bool, the shape of scores."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _shift(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Candidate index -> block of the request; -1 stays."""
    return torch.where(blocks >= 0, blocks + first, blocks)
