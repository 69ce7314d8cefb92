"""Block logits from digests or exact keys, and block scores from logits, in plain PyTorch.

A block logit stands for the log of the attention mass that a query head would give to the block,
up to a constant per query head. Query head ``h`` belongs to KV head ``h // (Hq / H)``. Math is in
float32, or in float64 where an input is float64; so is the result. A block that holds NaN makes its
own logits NaN and no other's.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4


def minmax_logits(queries: Tensor, digest: Tensor, mix: float, scale: float) -> Tensor:
    """Block logits from element-wise min and max of the keys.

    ``scale * (q.(max + min)/2 + mix * |q|.(max - min)/2)``: ``mix = 1`` is Quest's upper bound of
    ``q.k`` (https://arxiv.org/abs/2406.10774), ``mix = 0.5`` found more of the true blocks.

    Args:
        queries: ``[R, Q, Hq, D]``, any float dtype.
        digest: ``[R, N, H, 2, D]``, index 0 the minimum and 1 the maximum, any float dtype.
        mix: weight of the half range, 0 to 1.
        scale: softmax scale of the model, positive.

    Returns:
        ``[R, Q, Hq, N]``.

    Raises:
        ValueError: ``Hq`` is not a multiple of ``H``.
    """
    dtype = _math_dtype(queries, digest)
    low, high = digest.to(dtype).unbind(-2)
    x = _by_kv_head(queries.to(dtype) * scale, digest.shape[2])
    middle = ((high + low) / 2).permute(0, 2, 3, 1)
    half_range = ((high - low) / 2).permute(0, 2, 3, 1)
    return _by_query(x @ middle + mix * (x.abs() @ half_range), queries)


def keys4_logits(queries: Tensor, digest: Keys4, scale: float) -> Tensor:
    """Block logits from keys in 4 bits: every token scored, logsumexp over the tokens of a block.

    The scale of each channel goes into the query, and ``q.zero``, one number per block, is added
    after the logsumexp, so codes are never dequantised. One row at a time: its codes stay in cache,
    four times faster on a CPU than all rows at once.

    Args:
        queries: ``[R, Q, Hq, D]``, any float dtype.
        digest: codes ``[R, N, H, B, D/2]`` and scale_zero ``[R, N, H, 2, D]``.
        scale: softmax scale of the model.

    Returns:
        ``[R, Q, Hq, N]``.

    Raises:
        ValueError: ``Hq`` is not a multiple of ``H``.
    """
    dtype = _math_dtype(queries, digest.scale_zero)
    num_rows, num_blocks, num_kv_heads = digest.codes.shape[:3]
    x = _by_kv_head(queries.to(dtype) * scale, num_kv_heads)
    logits = x.new_empty(num_rows, num_kv_heads, x.shape[2], num_blocks)
    for row in range(num_rows):
        packed = digest.codes[row]
        codes = torch.cat([packed & 15, packed >> 4], dim=-1).to(dtype)
        scales, zeros = digest.scale_zero[row].to(dtype).unbind(-2)
        dots = (x[row] * scales.unsqueeze(-2)) @ codes.transpose(-1, -2)
        logits[row] = dots.logsumexp(-1).permute(1, 2, 0) + x[row] @ zeros.permute(1, 2, 0)
    return _by_query(logits, queries)


def key_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Block logits from exact keys: the log of the block's unnormalised attention mass.

    What every digest is compared with.

    Args:
        queries: ``[R, Q, Hq, D]``, any float dtype.
        keys: ``[R, N, H, B, D]``, any float dtype.
        scale: softmax scale of the model.

    Returns:
        ``[R, Q, Hq, N]``.

    Raises:
        ValueError: ``Hq`` is not a multiple of ``H``.
    """
    dtype = _math_dtype(queries, keys)
    x = _by_kv_head(queries.to(dtype) * scale, keys.shape[2])
    dots = x.unsqueeze(1) @ keys.to(dtype).transpose(-1, -2)
    return _by_query(dots.logsumexp(-1).permute(0, 2, 3, 1), queries)


def block_scores(
    logits: Tensor, candidates: Tensor, num_kv_heads: int, query_mask: Tensor | None = None
) -> Tensor:
    """Score of each block for each KV head.

    Softmax of each query head over the candidate blocks, mean over the query heads of the KV head,
    mean over the valid queries. So the scores of a KV head add up to 1.

    Args:
        logits: ``[R, Q, Hq, N]``, any float dtype.
        candidates: bool ``[R, N]``, blocks that may be wanted.
        num_kv_heads: ``H``.
        query_mask: bool ``[R, Q]``, queries that count; None means all.

    Returns:
        ``[R, H, N]``. Exactly 0 where a block is no candidate, whatever its logit, and in rows with
        no candidate or no valid query. The logits of a query that does not count are not looked at.
        A NaN or +inf logit at a candidate of a valid query makes NaN scores.

    Raises:
        ValueError: ``Hq`` is not a multiple of ``num_kv_heads``.
    """
    dtype = _math_dtype(logits, logits)
    group = group_size(logits.shape[2], num_kv_heads)
    allowed = candidates[:, None, None, :]
    shares = logits.to(dtype).masked_fill(~allowed, -math.inf).softmax(-1)
    # A row without candidates is all -inf, whose softmax is NaN: the fill takes that away too.
    shares = shares.masked_fill(~allowed, 0)
    by_query = shares.reshape(*shares.shape[:2], num_kv_heads, group, shares.shape[3]).mean(3)
    if query_mask is None:
        query_mask = candidates.new_ones(logits.shape[:2])
    valid = by_query.masked_fill(~query_mask[:, :, None, None], 0)
    return valid.sum(1) / query_mask.sum(1).clamp(min=1)[:, None, None]


def minmax_scores(
    queries: Tensor,
    lookahead: Tensor,
    digests: Tensor,
    blocks: Tensor,
    first: Tensor,
    end: Tensor,
    mix: float,
    scale: float,
) -> Tensor:
    """Scores of one layer for requests of different lengths, digests taken from the pool.

    ``minmax_logits`` and ``block_scores`` of one lookahead query per row. Row ``r`` is a request:
    its candidates are its blocks ``first[r]`` to ``end[r] - 1``, block ``n`` having digest row
    ``blocks[r, n]``. Nothing else is read: other entries of ``blocks`` may be anything.

    Args:
        queries: ``[R, Q, Hq, D]``, any float dtype.
        lookahead: integer ``[R]``, which of the ``Q`` queries counts.
        digests: ``[capacity, H, 2, D]``, any float dtype, such as one layer of a larger pool.
        blocks: integer ``[R, N]``.
        first: integer ``[R]``, ``0 <= first``.
        end: integer ``[R]``, ``end <= N``; no candidates where ``end <= first``.
        mix: weight of the half range, 0 to 1.
        scale: softmax scale of the model, positive.

    Returns:
        ``[R, H, N]``; exactly 0 where a block is no candidate.
    """
    scores = [
        block_scores(
            minmax_logits(query, digests[rows][None], mix, scale), candidates, digests.shape[1]
        )
        for query, rows, candidates in _rows(queries, lookahead, blocks, first, end)
    ]
    return _spread(scores, digests.shape[1], blocks, first)


def keys4_scores(
    queries: Tensor,
    lookahead: Tensor,
    digests: Keys4,
    blocks: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
) -> Tensor:
    """As ``minmax_scores``, with ``keys4_logits``.

    Args:
        queries: ``[R, Q, Hq, D]``, any float dtype.
        lookahead: integer ``[R]``, which of the ``Q`` queries counts.
        digests: codes ``[capacity, H, B, D/2]`` and scale_zero ``[capacity, H, 2, D]``.
        blocks: integer ``[R, N]``, digest row of each block of a request.
        first: integer ``[R]``, first candidate.
        end: integer ``[R]``, one past the last.
        scale: softmax scale of the model, positive.

    Returns:
        ``[R, H, N]``; exactly 0 where a block is no candidate.
    """
    num_kv_heads = digests.codes.shape[1]
    scores = []
    for query, rows, candidates in _rows(queries, lookahead, blocks, first, end):
        digest = Keys4(*(part[rows][None] for part in digests))
        scores.append(block_scores(keys4_logits(query, digest, scale), candidates, num_kv_heads))
    return _spread(scores, num_kv_heads, blocks, first)


def _rows(
    queries: Tensor, lookahead: Tensor, blocks: Tensor, first: Tensor, end: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per row its lookahead query ``[1, 1, Hq, D]``, digest rows and, all True, candidates."""
    for row, (query, start, stop) in enumerate(
        zip(lookahead.tolist(), first.tolist(), end.tolist(), strict=True)
    ):
        rows = blocks[row, start : max(start, stop)].long()
        candidates = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
        yield queries[row : row + 1, query : query + 1], rows, candidates


def _spread(scores: list[Tensor], num_kv_heads: int, blocks: Tensor, first: Tensor) -> Tensor:
    """``[R, H, N]`` with the scores ``[1, H, n]`` of each row at its candidates."""
    shape = (len(scores), num_kv_heads, blocks.shape[1])
    dtype = scores[0].dtype if scores else torch.float32
    out = torch.zeros(shape, dtype=dtype, device=blocks.device)
    for row, (part, start) in enumerate(zip(scores, first.tolist(), strict=True)):
        out[row, :, start : start + part.shape[-1]] = part[0]
    return out


def _math_dtype(first: Tensor, second: Tensor) -> torch.dtype:
    """float32, or float64 where an input is float64."""
    wider = torch.promote_types(first.dtype, second.dtype)
    return torch.promote_types(wider, torch.float32)


def group_size(num_query_heads: int, num_kv_heads: int) -> int:
    """Query heads of one KV head.

    Raises:
        ValueError: the heads do not divide.
    """
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of KV heads; "
            f"found {num_query_heads} and {num_kv_heads}"
        )
    return num_query_heads // num_kv_heads


def _by_kv_head(queries: Tensor, num_kv_heads: int) -> Tensor:
    """``[R, Q, Hq, D]`` -> ``[R, H, Q * G, D]``."""
    group = group_size(queries.shape[2], num_kv_heads)
    num_rows, num_queries, _, head_dim = queries.shape
    grouped = queries.reshape(num_rows, num_queries, num_kv_heads, group, head_dim)
    return grouped.transpose(1, 2).flatten(2, 3)


def _by_query(logits: Tensor, queries: Tensor) -> Tensor:
    """``[R, H, Q * G, N]`` -> ``[R, Q, Hq, N]``, the inverse of ``_by_kv_head``."""
    num_rows, num_kv_heads, _, num_blocks = logits.shape
    num_queries, group = queries.shape[1], queries.shape[2] // num_kv_heads
    grouped = logits.reshape(num_rows, num_kv_heads, num_queries, group, num_blocks)
    return grouped.transpose(1, 2).flatten(2, 3)
