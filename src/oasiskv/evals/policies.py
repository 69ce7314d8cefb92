"""What else could be attended to: the selections that OasisKV is compared with.

A policy chooses, for each row (a decoded token) and query head, blocks between sink and window. It
sees the whole KV cache, as if there were no tiers: what it would have to move is counted, and no
cap holds it. All are given the same number of blocks as OasisKV has slots. Letters in shapes are
those of ``evals.lanes.kv``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from oasiskv.evals.lanes.kv import LaneKV, by_query_head


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
        """Block scores ``[Q, N, H, C]`` from block logits ``[Q, N, Hq, C]``.

        ``ops.score.reference.block_scores`` of rows that all have candidates.
        """
        shares = logits.masked_fill(~self.candidates[:, :, None], -torch.inf).softmax(-1)
        return torch.unflatten(shares, 2, (self.kv_heads, -1)).mean(3)


def best_blocks(scores: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """The ``counts[n]`` best candidates, ties to the lower index: bool, the shape of scores.

    Args:
        scores: ``[Q, N, heads, C]``, any float.
        candidates: bool ``[Q, N, C]``.
        counts: int64 ``[N]``.
    """
    allowed = candidates[:, :, None]
    ranked = scores.masked_fill(~allowed, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(order.shape[-1], device=order.device)
    first = (rank < counts[:, None, None]).expand_as(order)
    return torch.zeros_like(first).scatter_(-1, order, first) & allowed


class Policy(ABC):
    """Chooses the blocks of the highest score, as many as a row may have.

    Attributes:
        by_query_head: each query head has blocks of its own; otherwise those of a KV head share.
    """

    by_query_head = False

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """``[Q, N, H or Hq, C]``, any float; blocks that are no candidates are not looked at."""

    def every(self, layer: int) -> bool:
        """All candidates are chosen, whatever their scores."""
        return False


def choose(policies: Sequence[Policy], views: Sequence[LayerView]) -> Tensor:
    """What policies choose, one after the other: bool ``[Q, N, Hq, C]``.

    Args:
        policies: those of the same kind of heads side by side, so that few sorts do for all.
        views: of each its rows.
    """
    parts = []
    both = zip(policies, views, strict=True)
    for (own_heads, every), run in groupby(
        both, key=lambda each: (each[0].by_query_head, each[0].every(each[1].layer))
    ):
        own = list(run)
        candidates = torch.cat([view.candidates for _, view in own], dim=1)
        heads = own[0][1].queries.shape[2]
        if every:
            parts.append(candidates[:, :, None].expand(-1, -1, heads, -1))
            continue
        scores = torch.cat([policy.score(view).float() for policy, view in own], dim=1)
        chosen = best_blocks(scores, candidates, torch.cat([view.counts for _, view in own]))
        parts.append(
            chosen if own_heads else chosen.repeat_interleave(heads // scores.shape[2], dim=2)
        )
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


class Dense(Policy):
    """All of them."""

    by_query_head = True

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.candidates[:, :, None].expand(-1, -1, view.queries.shape[2], -1)

    def every(self, layer: int) -> bool:
        """See ``Policy``."""
        return True


class Quest(Policy):
    """Quest (https://arxiv.org/abs/2406.10774), on blocks of 16 tokens as in the paper.

    Criticality of a block for a query head: the sum over channels of the larger of q times the
    channel's minimum and q times its maximum. Each query head takes its own most critical blocks,
    by its query of this very step, so nothing is predicted. Its first two layers stay dense.
    """

    by_query_head = True
    DENSE_LAYERS = 2

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.kv.bound_logits(view.layer, view.queries, view.lanes, view.scale)

    def every(self, layer: int) -> bool:
        """See ``Policy``."""
        return layer < self.DENSE_LAYERS


class ExactTop(Policy):
    """The best by exact keys and the row's own query: the upper bound of any digest."""

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.scores(by_query_head(view.token_logits.logsumexp(-1)))


class Stale(Policy):
    """The best by the query of the token before: what is known without a draft.

    Digest and scores are OasisKV's (4-bit keys); no hot set outlives the step and no cap holds it.
    """

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        logits = view.kv.keys4_logits(view.layer, view.stale, view.lanes, view.scale)
        return view.scores(logits)


class WindowOnly(Policy):
    """The newest ones: a window that is longer by as many blocks (StreamingLLM, 2309.17453)."""

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        blocks = view.kv.block_of[:, None, None]
        return blocks.expand(-1, len(view.lanes), view.kv_heads, -1)


@dataclass
class RandomBlocks(Policy):
    """Others for each row, layer and KV head.

    Args:
        seed: drives the choice.
    """

    seed: int

    def score(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        # Nothing but these decides: neither how rows come together nor who else is in the batch.
        row = view.positions * 1009 + (view.layer + self.seed * 1_000_003)
        heads = torch.arange(view.kv_heads, device=row.device)[:, None]
        blocks = view.kv.block_of[:, None, None] * view.kv_heads + heads
        draws = _mixed(row[..., None, None] * -0x61C8864680B583EB + blocks)
        # As many bits as a float32 holds; ties are rare and go to the lower block.
        return (draws & ((1 << 24) - 1)).float()


def _mixed(values: Tensor) -> Tensor:
    """Bits of int64 spread over all places (the finaliser of splitmix64), wrapping around."""
    values = (values ^ _shifted(values, 30)) * -0x40A7B892E31B1A47
    values = (values ^ _shifted(values, 27)) * -0x6B2FB644ECCEEE15
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Right by ``places``, zeros coming in: int64 would bring its sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)
