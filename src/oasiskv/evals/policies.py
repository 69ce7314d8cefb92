"""What else could be attended to: the selections that OasisKV is compared with.

A policy chooses, for each row (a decoded token) and query head, blocks between sink and window. It
sees the whole KV cache, as if there were no tiers: what it would have to move is counted, and no
cap holds it. All are given the same number of blocks as OasisKV has slots.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oasiskv.core.selection import top_blocks
from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax
from oasiskv.ops.score.reference import block_scores, key_logits, keys4_logits, minmax_logits


@dataclass
class LayerView:
    """What a policy sees of one layer.

    Args:
        layer: the layer.
        queries: ``[rows, query heads, head_dim]``, of these tokens.
        stale: the same of the tokens just before each of them.
        tiles: ``[blocks, heads, block_tokens, 2 * head_dim]`` closed blocks of the request.
        candidates: bool ``[rows, blocks]``, those between sink and window of each row.
        scale: softmax scale of the model.
        first_position: position of the first row.
    """

    layer: int
    queries: Tensor
    stale: Tensor
    tiles: Tensor
    candidates: Tensor
    scale: float
    first_position: int

    @property
    def keys(self) -> Tensor:
        """``[blocks, heads, block_tokens, head_dim]``."""
        return self.tiles[..., : self.tiles.shape[-1] // 2]

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.queries.shape[1] // self.tiles.shape[1]

    def exact_scores(self) -> Tensor:
        """Share of the attention over the candidates, float ``[rows, KV heads, blocks]``."""
        return self.scores(key_logits(self.queries[None], self.keys[None], self.scale))

    def scores(self, logits: Tensor) -> Tensor:
        """Block scores per KV head from logits ``[1, rows, query heads, blocks]``."""
        return block_scores(logits.transpose(0, 1), self.candidates, self.tiles.shape[1])

    def best(self, scores: Tensor, count: int) -> Tensor:
        """The ``count`` best candidates: bool ``[rows, query heads, blocks]``.

        Args:
            scores: ``[rows, KV heads or query heads, blocks]``, any float.
            count: blocks.
        """
        allowed = self.candidates[:, None]
        chosen = top_blocks(scores.masked_fill(~allowed, -torch.inf), count) & allowed
        return chosen.repeat_interleave(self.queries.shape[1] // scores.shape[1], dim=1)


class Policy(ABC):
    """Chooses blocks.

    Args:
        count: blocks per row and head.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def choose(self, view: LayerView) -> Tensor:
        """Bool ``[rows, query heads, blocks]``; blocks that are no candidates are not looked at."""


class Dense(Policy):
    """All of them."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.candidates[:, None].expand(-1, view.queries.shape[1], -1)


class WindowOnly(Policy):
    """The newest ones: a window that is longer by as many blocks (StreamingLLM, 2309.17453)."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        from_last = view.candidates.flip(-1).cumsum(-1).flip(-1)
        recent = view.candidates & (from_last <= self.count)
        return recent[:, None].expand(-1, view.queries.shape[1], -1)


class RandomBlocks(Policy):
    """Others for each row, layer and KV head.

    Args:
        count: blocks per row and head.
        seed: drives the choice.
    """

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count)
        self._seed = seed

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        rows, blocks = view.candidates.shape
        heads = view.tiles.shape[1]
        draws = []
        for row in range(rows):
            # One generator a row, blocks first: the choice does not depend on how rows come
            # together, nor on blocks after them.
            place = (view.first_position + row) * 1009 + view.layer
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + place)
            draws.append(torch.rand((blocks, heads), generator=generator).T)
        return view.best(torch.stack(draws).to(view.candidates.device), self.count)


class ExactTop(Policy):
    """The best by exact keys and the row's own query: the upper bound of any digest."""

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        return view.best(view.exact_scores(), self.count)


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
            return Dense(self.count).choose(view)
        digest = build_minmax(view.tiles)
        bound = minmax_logits(view.queries[None], digest[None], 1.0, view.scale)[0]
        return view.best(bound, self.count)


class Stale(Policy):
    """The best by the query of the token before: what is known without a draft.

    Digest and scores are OasisKV's (4-bit keys); no hot set outlives the step and no cap holds it.
    """

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        digest = Keys4(*(part[None] for part in build_keys4(view.tiles)))
        logits = keys4_logits(view.stale[None], digest, view.scale)
        return view.best(view.scores(logits), self.count)


@dataclass
class Replay(Policy):
    """What an engine held: lets its runs be measured like any other.

    Attributes:
        blocks: position -> int64 ``[layers, KV heads, slots]``, -1 for empty slots.
    """

    count: int = 0
    blocks: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, view: LayerView) -> Tensor:
        """See ``Policy``."""
        rows, total = view.candidates.shape
        mask = view.candidates.new_zeros((rows, view.tiles.shape[1], total + 1))
        for row in range(rows):
            held = self.blocks[view.first_position + row][view.layer].to(mask.device)
            mask[row].scatter_(-1, torch.where(held >= 0, held, total), True)
        return mask[..., :total].repeat_interleave(view.group, dim=1)
