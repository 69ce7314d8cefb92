"""Block scores in Triton: logits straight from the digest pool, then softmax and mean.

Arguments of one dimension are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.score.reference import group_size
from oasiskv.ops.strides import check_last_dim

# Heads are the fastest grid axis, so that the digests of one block, side by side in the pool, are
# read at about the same time. Blocks are rows of the matrix product.
_MINMAX_BLOCKS, _MINMAX_TILES, _MINMAX_STAGES, _MINMAX_WARPS = 64, 2, 2, 4
_KEYS4_BLOCKS, _KEYS4_STAGES, _KEYS4_WARPS = 32, 4, 2
_SOFTMAX_BLOCKS = 1024


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
    logits, grid, shape = _prepare(queries, digests, blocks, _MINMAX_BLOCKS, _MINMAX_TILES)
    check_last_dim(queries=queries, digests=digests, blocks=blocks)
    _minmax_logits_kernel[grid](
        queries, lookahead, digests, blocks, first, end, logits,
        queries.stride(0), queries.stride(1), queries.stride(2),
        digests.stride(0), digests.stride(1), digests.stride(2),
        blocks.stride(0), blocks.shape[1], mix, scale / 2,
        DIM=digests.shape[-1], DIM_PADDED=max(16, triton.next_power_of_2(digests.shape[-1])),
        MATH=_math_dtype(digests), TILES=_MINMAX_TILES, STAGES=_MINMAX_STAGES, **shape,
        num_warps=_MINMAX_WARPS,
    )  # fmt: skip
    return _scores(logits, first, end, digests.shape[1])


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

    A key less its zero is ``code * scale``, rounded to float16 for the tensor core (a quarter of
    it, so that no legal scale overflows): a logit is off by at most ``2**-11 * softmax scale *
    |query| . |code * scale|``, a fraction of the half step that 4 bits cost.

    Floor: digests read, ``B * D / 2 + 4 * D`` bytes per candidate, KV head and row, over the
    bandwidth of HBM: 805 MB at ``R = 64, N = 1,024, H = 8, B = 16, D = 128``.
    """
    codes, scale_zero = digests
    logits, grid, shape = _prepare(queries, codes, blocks, _KEYS4_BLOCKS, 1)
    check_last_dim(queries=queries, codes=codes, scale_zero=scale_zero, blocks=blocks)
    half = codes.shape[-1]
    _keys4_logits_kernel[grid](
        queries, lookahead, codes, scale_zero, blocks, first, end, logits,
        queries.stride(0), queries.stride(1), queries.stride(2),
        codes.stride(0), codes.stride(1), codes.stride(2),
        scale_zero.stride(0), scale_zero.stride(1), scale_zero.stride(2),
        blocks.stride(0), blocks.shape[1], scale,
        TOKENS=codes.shape[2], HALF=half, HALF_PADDED=max(16, triton.next_power_of_2(half)),
        SPLIT=queries.dtype == torch.float32, STAGES=_KEYS4_STAGES,
        PACKED=codes.device.type == "cuda", **shape,
        num_warps=_KEYS4_WARPS,
    )  # fmt: skip
    return _scores(logits, first, end, codes.shape[1])


def _prepare(
    queries: Tensor, digests: Tensor, blocks: Tensor, tile_blocks: int, tiles: int
) -> tuple[Tensor, tuple[int, int, int], dict[str, int]]:
    """Logits ``[R, Hq, N]`` to fill, the grid, and what is constant for both kernels."""
    num_rows, _, num_query_heads, _ = queries.shape
    num_kv_heads = digests.shape[1]
    group = group_size(num_query_heads, num_kv_heads)
    logits = torch.empty(
        (num_rows, num_query_heads, blocks.shape[1]), dtype=torch.float32, device=queries.device
    )
    grid = (num_kv_heads, triton.cdiv(blocks.shape[1], tile_blocks * tiles), num_rows)
    padded = max(8, triton.next_power_of_2(group))
    return logits, grid, {"GROUP": group, "GROUP_PADDED": padded, "BLOCKS": tile_blocks}


def _scores(logits: Tensor, first: Tensor, end: Tensor, num_kv_heads: int) -> Tensor:
    num_rows, num_query_heads, num_blocks = logits.shape
    group = num_query_heads // num_kv_heads
    scores = logits.new_empty(num_rows, num_kv_heads, num_blocks)
    if scores.numel():
        _scores_kernel[(num_kv_heads, num_rows)](
            logits, first, end, scores, num_blocks,
            GROUP=group, GROUP_PADDED=triton.next_power_of_2(group),
            BLOCKS=min(_SOFTMAX_BLOCKS, triton.next_power_of_2(num_blocks)),
            num_warps=4,
        )  # fmt: skip
    return scores


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


@triton.jit
def _small_ints(codes):
    """Integers below 1,024 as float16: 1,024 + n has n in its lowest bits. Conversion is slower."""
    return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _packed_small_ints(codes):
    """``_small_ints`` of the low and of the high nibbles, four bytes in 15 instructions."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, base;
        mov.b32 base, 0x64006400;
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        prmt.b32 $0, low, 0x64646464, 0x4140;
        prmt.b32 $1, low, 0x64646464, 0x4342;
        prmt.b32 $2, high, 0x64646464, 0x4140;
        prmt.b32 $3, high, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, base;
        sub.rn.f16x2 $1, $1, base;
        sub.rn.f16x2 $2, $2, base;
        sub.rn.f16x2 $3, $3, base;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _keys4_logits_kernel(
    queries, lookahead, codes, scale_zero, blocks, first, end, logits,
    query_row, query_place, query_head,
    codes_row, codes_head, codes_token,
    scale_row, scale_head, scale_part,
    blocks_row, num_blocks, softmax_scale,
    TOKENS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    lower = tl.load(first + row).to(tl.int32)
    upper = tl.load(end + row).to(tl.int32)
    start = tl.program_id(1) * BLOCKS
    if (start < upper) & (start + BLOCKS > lower):
        place = tl.load(lookahead + row).to(tl.int64)
        member = tl.arange(0, GROUP_PADDED)
        channel = tl.arange(0, HALF_PADDED)
        inside = channel < HALF
        query = queries + row * query_row + place * query_place
        query += (head * GROUP + member)[None, :] * query_head + channel[:, None]
        mask = inside[:, None] & (member < GROUP)[None, :]
        low_query = tl.load(query, mask=mask, other=0.0).to(tl.float32)
        high_query = tl.load(query + HALF, mask=mask, other=0.0).to(tl.float32)
        low_main = low_query.to(tl.float16)
        high_main = high_query.to(tl.float16)
        low_rest = (low_query - low_main.to(tl.float32)).to(tl.float16)
        high_rest = (high_query - high_main.to(tl.float32)).to(tl.float16)

        block = start + tl.arange(0, BLOCKS)
        candidate = (block >= lower) & (block < upper)
        digest = tl.load(blocks + row * blocks_row + block, mask=candidate, other=0).to(tl.int64)
        mask = candidate[:, None] & inside[None, :]
        at = scale_zero + digest[:, None] * scale_row + head * scale_head + channel[None, :]
        low_scale = tl.load(at, mask=mask, other=0.0) * 0.25
        high_scale = tl.load(at + HALF, mask=mask, other=0.0) * 0.25
        low_zero = tl.load(at + scale_part, mask=mask, other=0.0)
        high_zero = tl.load(at + scale_part + HALF, mask=mask, other=0.0)
        base = tl.dot(low_zero, low_main)
        base = tl.dot(high_zero, high_main, base)
        if SPLIT:
            base = tl.dot(low_zero, low_rest, base)
            base = tl.dot(high_zero, high_rest, base)

        # In powers of 2; the 4 undoes the quarter in the scales.
        factor = softmax_scale * 4 * 1.4426950408889634
        top = tl.full([BLOCKS, GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([BLOCKS, GROUP_PADDED], tl.float32)
        at = codes + digest[:, None] * codes_row + head * codes_head + channel[None, :]
        for token in tl.range(0, TOKENS, num_stages=STAGES):
            code = tl.load(at + token * codes_token, mask=mask, other=0)
            if PACKED:
                low, high = _packed_small_ints(code)
            else:
                low, high = _small_ints(code & 15), _small_ints(code >> 4)
            low, high = low * low_scale, high * high_scale
            logit = tl.dot(low, low_main)
            logit = tl.dot(high, high_main, logit)
            if SPLIT:
                logit = tl.dot(low, low_rest, logit)
                logit = tl.dot(high, high_rest, logit)
            logit *= factor
            highest = tl.maximum(top, logit)
            total = total * tl.exp2(top - highest) + tl.exp2(logit - highest)
            top = highest
        logit = (top + tl.log2(total)) * 0.6931471805599453 + base * softmax_scale
        heads = tl.num_programs(0) * GROUP
        out = logits + (row * heads + head * GROUP + member)[None, :] * num_blocks
        mask = candidate[:, None] & (member < GROUP)[None, :]
        tl.store(out + block[:, None], logit, mask=mask)


@triton.jit
def _scores_kernel(
    logits, first, end, scores, num_blocks,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lower = tl.load(first + row).to(tl.int32)
    upper = tl.load(end + row).to(tl.int32)
    pair = row * tl.num_programs(0) + head
    member = tl.arange(0, GROUP_PADDED)
    at = logits + (pair * GROUP + member)[:, None] * num_blocks
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    for start in range(lower // BLOCKS * BLOCKS, upper, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        mask = (member < GROUP)[:, None] & ((block >= lower) & (block < upper))[None, :]
        logit = tl.load(at + block[None, :], mask=mask, other=float("-inf"))
        highest = tl.maximum(top, tl.max(logit, axis=1))
        # While only blocks before the candidates were seen there is no maximum to subtract.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(logit - shift[:, None]), axis=1)
        top = highest
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where((member < GROUP) & (lower < upper), total, 1.0)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        candidate = (block >= lower) & (block < upper)
        mask = (member < GROUP)[:, None] & candidate[None, :]
        logit = tl.load(at + block[None, :], mask=mask, other=float("-inf"))
        share = tl.where(mask, tl.exp(logit - shift[:, None]) / total[:, None], 0.0)
        score = tl.sum(share, axis=0) / GROUP
        tl.store(scores + pair * num_blocks + block, score, mask=block < num_blocks)
