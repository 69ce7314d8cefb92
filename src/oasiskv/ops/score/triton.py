"""Block scores in Triton: logits straight from the digest pool, then softmax and mean.

Arguments of one dimension are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.score.keys4_triton import keys4_logits
from oasiskv.ops.score.launch import empty_logits
from oasiskv.ops.score.softmax_triton import softmax_scores
from oasiskv.ops.strides import check_last_dim

# Heads are the fastest grid axis, so that the digests of one block, side by side in the pool, are
# read at about the same time. Blocks are rows of the matrix product.
_MINMAX_BLOCKS, _MINMAX_TILES, _MINMAX_STAGES, _MINMAX_WARPS = 64, 2, 2, 4


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
    """As ``reference.minmax_scores``, in float32, without synchronisation: ``N`` is a maximum.

    The logit is linear in min and max once the query is split by sign: one matrix product with the
    query heads of a KV head as columns. Half-precision digests go in as they are; the query goes in
    as two terms of their dtype, which keeps about 16 bits of it.

    Floor: digests read, ``4 * D`` bytes per candidate, KV head and row from bf16, over the
    bandwidth of HBM: 268 MB at ``R = 64, N = 1,024, H = 8, D = 128``.
    """
    check_last_dim(queries=queries, digests=digests, blocks=blocks)
    num_kv_heads, _, dim = digests.shape[1:]
    logits = empty_logits(queries, num_kv_heads, blocks)
    num_rows, num_query_heads, num_blocks = logits.shape
    group = num_query_heads // num_kv_heads
    if logits.numel():
        grid = (num_kv_heads, triton.cdiv(num_blocks, _MINMAX_BLOCKS * _MINMAX_TILES), num_rows)
        _minmax_logits_kernel[grid](
            queries, lookahead, digests, blocks, first, end, logits,
            queries.stride(0), queries.stride(1), queries.stride(2),
            digests.stride(0), digests.stride(1), digests.stride(2),
            blocks.stride(0), num_blocks, mix, scale / 2,
            DIM=dim, DIM_PADDED=max(16, triton.next_power_of_2(dim)),
            GROUP=group, GROUP_PADDED=max(8, triton.next_power_of_2(group)),
            MATH=_math_dtype(digests), BLOCKS=_MINMAX_BLOCKS, TILES=_MINMAX_TILES,
            STAGES=_MINMAX_STAGES, num_warps=_MINMAX_WARPS,
        )  # fmt: skip
    return softmax_scores(logits, first, end, num_kv_heads)


def keys4_scores(
    queries: Tensor,
    lookahead: Tensor,
    digests: Keys4,
    blocks: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
) -> Tensor:
    """As ``reference.keys4_scores``, in float32, without synchronisation: ``N`` is a maximum.

    A code of 4 bits in the lowest bits of a float16 is a number too, the subnormal ``code *
    2**-24``, which the tensor core multiplies exactly and at full speed. So codes are masked out of
    the pool's words and never converted, which would cost more than all the rest. The scale of each
    channel goes into the query instead, block by block, and that product is rounded to float16: a
    logit is off by at most ``softmax scale`` times

    - ``2**-11 * |query| . |code * scale|``, a fraction of the half step that 4 bits cost, and
    - ``2**-25 * largest |query| *`` the sum over channels of ``code * (1 + scale) + |zero|``, for
      channels so small beside the largest query that float16 is subnormal.

    Floor: digests read, ``B * D / 2 + 4 * D`` bytes per candidate, KV head and row, over the
    bandwidth of HBM: 805 MB at ``R = 64, N = 1,024, H = 8, B = 16, D = 128``.

    Raises:
        ValueError: ``B`` is not 16, ``D`` no multiple of 8, codes are not at multiples of 4 bytes,
            heads do not divide, or a last dimension is not contiguous.
    """
    logits = keys4_logits(queries, lookahead, digests, blocks, first, end, scale)
    return softmax_scores(logits, first, end, digests.codes.shape[1])


def _math_dtype(digests: Tensor) -> tl.dtype:
    """Dtype of the matrix product; the interpreter multiplies no bf16."""
    if digests.device.type == "cpu" or digests.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if digests.dtype == torch.bfloat16 else tl.float16


@triton.jit
def _dot(digest, weight, MATH: tl.constexpr):
    """``digest @ weight`` for a weight in float32, as two terms of ``MATH`` if that is shorter."""
    digest = digest.to(MATH)
    main = weight.to(MATH)
    out = tl.dot(digest, main, input_precision="ieee")
    if tl.float32 != MATH:
        out = tl.dot(digest, (weight - main.to(tl.float32)).to(MATH), out)
    return out


@triton.jit
def _minmax_logits_kernel(
    queries, lookahead, digests, blocks, first, end, logits,
    query_row, query_place, query_head,
    digest_row, digest_head, digest_part,
    blocks_row, num_blocks, mix, half_scale,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
    MATH: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    lower = tl.load(first + row).to(tl.int32)
    upper = tl.load(end + row).to(tl.int32)
    begin = tl.program_id(1) * (BLOCKS * TILES)
    stop = tl.minimum(upper, begin + BLOCKS * TILES)
    begin = tl.maximum(begin, lower // BLOCKS * BLOCKS)
    if begin < stop:
        place = tl.load(lookahead + row).to(tl.int64)
        member = tl.arange(0, GROUP_PADDED)
        channel = tl.arange(0, DIM_PADDED)
        inside = channel < DIM
        query = queries + row * query_row + place * query_place
        query += (head * GROUP + member)[None, :] * query_head + channel[:, None]
        mask = inside[:, None] & (member < GROUP)[None, :]
        query = tl.load(query, mask=mask, other=0.0).to(tl.float32)
        low_weight = query - mix * tl.abs(query)
        high_weight = query + mix * tl.abs(query)
        heads = tl.num_programs(0) * GROUP
        out = logits + (row * heads + head * GROUP + member)[None, :] * num_blocks
        for start in tl.range(begin, stop, BLOCKS, num_stages=STAGES):
            block = start + tl.arange(0, BLOCKS)
            candidate = (block >= lower) & (block < upper)
            digest = tl.load(blocks + row * blocks_row + block, mask=candidate, other=0)
            at = digests + digest.to(tl.int64)[:, None] * digest_row + head * digest_head
            at += channel[None, :]
            known = candidate[:, None] & inside[None, :]
            low = tl.load(at, mask=known, other=0.0)
            high = tl.load(at + digest_part, mask=known, other=0.0)
            logit = (_dot(low, low_weight, MATH) + _dot(high, high_weight, MATH)) * half_scale
            asked = candidate[:, None] & (member < GROUP)[None, :]
            tl.store(out + block[:, None], logit, mask=asked)
