"""What else could be attended to: the selections that OasisKV is compared with.

A policy chooses, for each row (a decoded token) and query head, blocks between sink and window. It
sees the whole KV cache, as if there were no tiers: what it would have to move is counted, and no
cap holds it. All are given the same number of blocks as OasisKV has slots. Letters in shapes are
those of ``evals.lanes.kv``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.evals.lanes.kv import LaneKV, by_query_head
from oasiskv.ops.score.reference import block_scores


@dataclass
class LayerView:
    """What a policy sees of one layer.

    Args:
        layer: the layer.
        kv: keys and digests of all layers.
        queries: ``[Q, N, Hq, D]``, of these tokens.
        stale: the same of the tokens just before each of them.
        lanes: int64 ``[N]`` lane of each row.
        positions: int64 ``[Q, N]``.
        candidates: bool ``[Q, N, C]``, the blocks between sink and window of each row.
        counts: int64 ``[N]``, blocks that each row may choose.
        token_logits: ``scale * q.k`` of every token, ``[Q, H, N, G, C, B]``.
        scale: softmax scale of the model.
    """

    layer: int
    kv: LaneKV
    queries: Tensor
    stale: Tensor
    lanes: Tensor
    positions: Tensor
    candidates: Tensor
    counts: Tensor
    token_logits: Tensor
    scale: float

    @property
    def kv_heads(self) -> int:
        """``H``."""
        return self.token_logits.shape[1]

    def scores(self, logits: Tensor) -> Tensor:
        """Block scores ``[Q, N, H, C]`` from block logits ``[Q, N, Hq, C]``."""
        rows = logits.flatten(0, 1)[:, None]
        scores = block_scores(rows, self.candidates.flatten(0, 1), self.kv_heads)
        return torch.unflatten(scores, 0, logits.shape[:2])

    def best(self, scores: Tensor) -> Tensor:
        """The best candidates of each row, ties to the lower index: bool ``[Q, N, Hq, C]``.

        Args:
            scores: ``[Q, N, H or Hq, C]``, any float.
        """
        chosen = best_blocks(scores, self.candidates, self.counts)
        return chosen.repeat_interleave(self.queries.shape[2] // scores.shape[2], dim=2)


def best_blocks(scores: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """The ``counts[n]`` best candidates, ties to the lower index: bool, the shape of scores.

    Args:
        scores: ``[Q, N, heads, C]``, any float.
        candidates: bool ``[Q, N, C]``.
        counts: int64 ``[N]``.
    """
    allowed = candidates[:, :, None]
    order = (
        scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    )
    rank = torch.arange(order.shape[-1], device=order.device)
    first = (rank < counts[:, None, None]).expand_as(order)
    return torch.zeros_like(first).scatter_(-1, order, first) & allowed


class Policy(ABC):
    """Chooses blocks."""

    @abstractmethod
    def choose(self, view: LayerView) -> Tensor:
        """Bool ``[Q, N, Hq, C]``; blocks that are no candidates are not looked at."""


class Dense(Policy):
    """All of them."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.candidates[:, :, None].expand(-1, -1, view.queries.shape[2], -1)


class WindowOnly(Policy):
    """The newest ones: a window that is longer by as many blocks (StreamingLLM, 2309.17453)."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        from_last = view.candidates.flip(-1).cumsum(-1).flip(-1)
        recent = view.candidates & (from_last <= view.counts[:, None])
        return recent[:, :, None].expand(-1, -1, view.queries.shape[2], -1)


@dataclass
class RandomBlocks(Policy):
    """Others for each row, layer and KV head.

    Args:
        seed: drives the choice.
    """

    seed: int

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        heads = torch.arange(view.kv_heads, device=view.positions.device)[:, None]
        blocks = view.kv.block_of[:, None, None]
        # Nothing but these decides: neither how rows come together nor who else is in the batch.
        place = _mixed(view.positions[..., None, None] * 1009 + view.layer + self.seed * 1_000_003)
        draws = _mixed(_mixed(place + heads) + blocks)
        # float64 holds 53 bits: enough for blocks of one row not to be tied.
        return view.best(draws.double())


class ExactTop(Policy):
    """The best by exact keys and the row's own query: the upper bound of any digest."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.best(view.scores(by_query_head(view.token_logits.logsumexp(-1))))


class Quest(Policy):
    """Quest (https://arxiv.org/abs/2406.10774), on blocks of 16 tokens as in the paper.

    Criticality of a block for a query head: the sum over channels of the larger of q times the
    channel's minimum and q times its maximum. Each query head takes its own most critical blocks,
    by its query of this very step, so nothing is predicted. Its first two layers stay dense.
    """

    DENSE_LAYERS = 2

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        if view.layer < self.DENSE_LAYERS:
            return Dense().choose(view)
        bound = view.kv.minmax_logits(view.layer, view.queries, view.lanes, 1.0, view.scale)
        return view.best(bound)


class Stale(Policy):
    """The best by the query of the token before: what is known without a draft.

    Digest and scores are OasisKV's (4-bit keys); no hot set outlives the step and no cap holds it.
    """

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        logits = view.kv.keys4_logits(view.layer, view.stale, view.lanes, view.scale)
        return view.best(view.scores(logits))


def _mixed(values: Tensor) -> Tensor:
    """Bits of int64 spread over all places (the finaliser of splitmix64), wrapping around."""
    values = (values ^ _shifted(values, 30)) * -0x40A7B892E31B1A47
    values = (values ^ _shifted(values, 27)) * -0x6B2FB644ECCEEE15
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Right by ``places``, zeros coming in: int64 would bring its sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)
