"""KV of lanes that share prompts: one copy of each prompt, and a tail for each lane.

A lane is one method at one budget; every lane decodes every question. Letters in shapes: ``L``
layers, ``Q`` questions, ``M`` lanes, ``N`` rows (tokens computed at once, of all lanes), ``H`` KV
heads, ``Hq`` query heads, ``G`` query heads of a KV head, ``D`` head dim, ``B`` tokens of a block,
``C`` blocks: those of the prompt, which lanes share, then those of the lane's tail. A question with
a shorter prompt has fewer shared blocks; those that it lacks are padding, to which nothing may
attend.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oasiskv.core.geometry import KVGeometry
from oasiskv.evals.lanes.rows import Rows
from oasiskv.hf.prefill import Prefilled
from oasiskv.ops.digest.reference import build_keys4, build_minmax, dequantize_keys4

NOWHERE = 2**40
"""Block number of padding: after every block that there is."""


class LaneKV:
    """Keys and values of all layers, and the digests that blocks are scored by.

    Args:
        geometry: sizes of the model.
        prefilled: of each question, KV of its prompt but the last tokens.
        lanes: ``M``.
        tail_tokens: most tokens of a question that are not prefilled.
        device: where all of it is.

    Attributes:
        block_of: int64 ``[Q, C]``, number of each block in its question; ``NOWHERE`` for padding.
        first_tail: int64 ``[Q]``, number of the first block of a tail.
        real: bool ``[Q, C]``, blocks that are no padding.
        spare: lane that takes what rows of padding write.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        prefilled: Sequence[Prefilled],
        lanes: int,
        tail_tokens: int,
        device: torch.device,
    ) -> None:
        size = geometry.block_tokens
        self._size, self._dim, self.spare = size, geometry.head_dim, lanes
        counts = [len(each.tokens) // size for each in prefilled]
        # The tokens of a prompt that fill no block stand in the tails, hence one block more.
        tail_blocks = geometry.blocks_for(tail_tokens) + 1
        self.first_tail = torch.tensor(counts, device=device)
        tile = (size, 2 * geometry.head_dim)
        layers, heads = geometry.num_layers, geometry.num_kv_heads
        shared = (layers, len(counts), heads, max(counts), *tile)
        tails = (layers, len(counts), lanes + 1, heads, tail_blocks, *tile)
        self._shared, self._tail = (
            torch.zeros(shape, dtype=geometry.dtype, device=device) for shape in (shared, tails)
        )
        for q, (each, count) in enumerate(zip(prefilled, counts, strict=True)):
            rest = len(each.tokens) % size
            for layer, tiles in enumerate(each.layers):
                self._shared[layer, q, :, :count] = tiles[:count].transpose(0, 1)
                if rest:
                    self._tail[layer, q, :, :, 0, :rest] = tiles[count, :, :rest]
        self._shared4, self._shared_range = _digests(self._shared)
        self._tail4, self._tail_range = _digests(self._tail)
        blocks = torch.arange(max(counts), device=device).expand(len(counts), -1)
        blocks = blocks.masked_fill(blocks >= self.first_tail[:, None], NOWHERE)
        after = self.first_tail[:, None] + torch.arange(tail_blocks, device=device)
        self.block_of = torch.cat((blocks, after), dim=1)
        # What ``write`` needs of a round, the same in all layers.
        self._place: tuple[Rows, Tensor, Tensor, Tensor] | None = None
        self.real = self.block_of < NOWHERE

    def write(self, layer: int, rows: Rows, kv: Tensor) -> None:
        """Write the KV of new tokens into tails.

        Args:
            layer: the layer.
            rows: whose they are.
            kv: ``[Q, N, H, 2 * D]``.
        """
        if self._place is None or self._place[0] is not rows:
            blocks = rows.positions // self._size - self.first_tail[:, None]
            tail = torch.arange(self._tail.shape[4], device=blocks.device)
            within = torch.arange(self._size, device=blocks.device)
            later = (self.first_tail[:, None] + tail)[..., None] * self._size + within
            unseen = later[:, None] > rows.positions[..., None, None]
            self._place = rows, blocks, rows.positions % self._size, unseen.flatten(-2)
        _, blocks, offsets, _ = self._place
        self._tail[layer][rows.questions, rows.writers, :, blocks, offsets] = kv

    def share_tail(self) -> None:
        """Give every lane the tail of lane 0."""
        self._tail[:, :, 1:] = self._tail[:, :, :1]

    def close(self, closed: Sequence[tuple[int, int, int]]) -> None:
        """Make the digests of blocks of tails that are full of tokens that stay.

        Args:
            closed: question, lane and number in the question of each block.
        """
        if not closed:
            return
        questions, lanes, blocks = torch.tensor(closed, device=self._tail.device).unbind(1)
        where = (slice(None), questions, lanes, slice(None), blocks - self.first_tail[questions])
        # Indices on both sides of a slice: what they pick comes first, ``[n, L, H, B, 2 * D]``.
        self._tail4[where], self._tail_range[where] = _digests(self._tail[where])

    def attend(
        self,
        layer: int,
        queries: Tensor,
        rows: Rows,
        scale: float,
        mask: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Softmax attention of rows whose KV is written.

        Args:
            layer: the layer.
            queries: ``[Q, N, Hq, D]``.
            rows: the round.
            scale: softmax scale of the model.
            mask: from ``scale * q.k``, float32 ``[Q, H, N, G, C, B]``, -inf for tokens of a tail
                that come later and anything for padding, to the same with -inf for whatever is not
                attended to.

        Returns:
            ``[Q, N, Hq, D]`` float32.
        """
        assert self._place is not None
        unseen = self._place[3]
        tails = self._tail[layer][:, rows.lanes]
        keys = self._shared[layer][..., : self._dim]
        dots = _dots(queries * scale, keys, tails[..., : self._dim], unseen)
        weights = mask(dots).flatten(-2).softmax(-1)
        values = self._shared[layer][..., self._dim :].flatten(-3, -2).float()
        own = tails[..., self._dim :].flatten(-3, -2).float()
        split = values.shape[-2]
        ours = weights[..., :split].flatten(2, 3) @ values
        theirs = weights[..., split:].transpose(1, 2) @ own
        return by_query_head(torch.unflatten(ours, 2, weights.shape[2:4]) + theirs.transpose(1, 2))

    def keys4_logits(self, layer: int, queries: Tensor, lanes: Tensor, scale: float) -> Tensor:
        """Block logits by 4-bit keys, ``[Q, N, Hq, C]``.

        ``ops.score.reference.keys4_logits`` with the keys dequantised once instead of each time.

        Args:
            layer: the layer.
            queries: ``[Q, N, Hq, D]``.
            lanes: int64 ``[N]``.
            scale: softmax scale of the model.
        """
        dots = _dots(queries * scale, self._shared4[layer], self._tail4[layer][:, lanes])
        return by_query_head(dots.logsumexp(-1))

    def bound_logits(self, layer: int, queries: Tensor, lanes: Tensor, scale: float) -> Tensor:
        """Upper bounds by minimum and maximum, ``[Q, N, Hq, C]``; arguments of ``keys4_logits``.

        ``ops.score.reference.minmax_logits`` with ``mix = 1``, as one product: of ``[q, |q|]`` with
        the middle and half the range of the keys.
        """
        both = torch.cat((queries, queries.abs()), dim=-1) * scale
        dots = _dots(both, self._shared_range[layer], self._tail_range[layer][:, lanes])
        return by_query_head(dots[..., 0])


def by_query_head(rows: Tensor) -> Tensor:
    """``[Q, H, N, G, ...]`` -> ``[Q, N, Hq, ...]``."""
    return rows.transpose(1, 2).flatten(2, 3)


def by_kv_head(rows: Tensor, heads: int) -> Tensor:
    """``[Q, N, Hq, ...]`` -> ``[Q, H, N, G, ...]``, the inverse."""
    return torch.unflatten(rows, 2, (heads, -1)).transpose(1, 2)


def _dots(queries: Tensor, shared: Tensor, tails: Tensor, unseen: Tensor | None = None) -> Tensor:
    """``q.k``, float32 ``[Q, H, N, G, C, B]``.

    Args:
        queries: ``[Q, N, Hq, D]``.
        shared: ``[Q, H, blocks, B, D]``.
        tails: ``[Q, N, H, blocks, B, D]``, the tail of each row's lane.
        unseen: bool ``[Q, N, tokens of a tail]``: -inf there.
    """
    rows = by_kv_head(queries.float(), shared.shape[1])
    ours = rows.flatten(2, 3) @ shared.flatten(-3, -2).float().mT
    theirs = rows.transpose(1, 2) @ tails.flatten(-3, -2).float().mT
    if unseen is not None:
        theirs.masked_fill_(unseen[:, :, None, None], -torch.inf)
    dots = torch.cat((torch.unflatten(ours, 2, rows.shape[2:4]), theirs.transpose(1, 2)), dim=-1)
    return torch.unflatten(dots, -1, (-1, shared.shape[-2]))


def _digests(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as 4 bits hold them ``[..., B, D]``, and ``[..., 1, 2 * D]`` for ``bound_logits``."""
    low, high = build_minmax(tiles).unbind(-2)
    middle_and_half = torch.cat(((high + low) / 2, (high - low) / 2), dim=-1)
    return dequantize_keys4(build_keys4(tiles)), middle_and_half.unsqueeze(-2)
