"""Block logits from 4-bit keys in Triton: codes are multiplied as they lie in the pool."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.score.launch import empty_logits, fit_span
from oasiskv.ops.strides import check_last_dim

# Programs of one warp: nothing is shared, so no warp waits for another. Five stages keep four tiles
# on their way.
_BLOCKS, _TILES, _STAGES, _WARPS = 4, 32, 5, 1
_TOKENS = 16


def keys4_logits(
    queries: Tensor,
    lookahead: Tensor,
    digests: Keys4,
    blocks: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
) -> Tensor:
    """Logits ``[R, Hq, N]``, float32; whatever was there where a block is no candidate.

    Args and errors as ``triton.keys4_scores``.
    """
    codes, scale_zero = digests
    check_last_dim(queries=queries, codes=codes, scale_zero=scale_zero, blocks=blocks)
    words = _as_words(codes)
    num_kv_heads, half = codes.shape[1], codes.shape[-1]
    logits = empty_logits(queries, num_kv_heads, blocks)
    num_rows, num_query_heads, num_blocks = logits.shape
    if logits.numel():
        group = num_query_heads // num_kv_heads
        span = fit_span(num_blocks, num_rows * num_kv_heads, _BLOCKS, _TILES)
        _keys4_logits_kernel[(num_kv_heads, triton.cdiv(num_blocks, span), num_rows)](
            queries, lookahead, words, scale_zero, blocks, first, end, logits,
            queries.stride(0), queries.stride(1), queries.stride(2),
            words.stride(0), words.stride(1), words.stride(2),
            scale_zero.stride(0), scale_zero.stride(1), scale_zero.stride(2),
            blocks.stride(0), num_blocks, span, scale,
            TOKENS=_TOKENS, HALF=half, HALF_PADDED=max(16, triton.next_power_of_2(half)),
            GROUP=group, GROUP_PADDED=max(8, triton.next_power_of_2(group)),
            SPLIT=queries.dtype == torch.float32, CUDA=codes.is_cuda,
            BLOCKS=_BLOCKS, STAGES=_STAGES, num_warps=_WARPS,
        )  # fmt: skip
    return logits


def _as_words(codes: Tensor) -> Tensor:
    """``[capacity, H, B, D/2]`` uint8 as int32 ``[capacity, H, B, D/8]``.

    Raises:
        ValueError: other than 16 tokens, a head dim that is no multiple of 8, or codes that do not
            lie at multiples of four bytes.
    """
    tokens, half = codes.shape[2:]
    if tokens != _TOKENS:
        raise ValueError(
            f"4-bit keys are scored in blocks of {_TOKENS} tokens; found {tokens}. "
            "Set the engine's block size to it, or use the min/max digest."
        )
    if half % 4:
        raise ValueError(
            f"4-bit keys are scored four bytes at a time, so that the head dim must be a multiple "
            f"of 8; found {2 * half}. Use the min/max digest for this model."
        )
    if codes.storage_offset() % 4 or any(stride % 4 for stride in codes.stride()[:-1]):
        raise ValueError(
            f"codes must lie at multiples of 4 bytes; found offset {codes.storage_offset()} and "
            f"strides {codes.stride()}"
        )
    return codes.view(torch.int32)


@triton.jit
def _deal(x, RUN: tl.constexpr):
    """``[A, K]`` in another order: runs of ``RUN``, from each quarter of the row in turn.

    Four threads share the channels of a matrix product, one run each in turn. Dealt so, what a
    thread needs lies side by side in memory, for one wide load, and nothing changes threads. A sum
    may take its terms in any order, if both factors have the same.
    """
    x = tl.reshape(x, [x.shape[0], 4, x.shape[1] // 4 // RUN, RUN])
    x = tl.permute(x, [0, 2, 1, 3])
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2] * RUN])


@triton.jit
def _dealt(K: tl.constexpr, RUN: tl.constexpr):
    """Which channel ``_deal`` puts at each place, ``[K]``."""
    place = tl.arange(0, K)
    run = place // RUN
    return ((run % 4) * (K // 4 // RUN) + run // 4) * RUN + place % RUN


@triton.jit
def _two_bytes(words, UPPER: tl.constexpr, CUDA: tl.constexpr):
    """Two bytes of each int32, the upper or the lower ones, each into a half of an int32."""
    if CUDA:
        asm: tl.constexpr = (
            "prmt.b32 $0, $1, 0, 0x4342;" if UPPER else "prmt.b32 $0, $1, 0, 0x4140;"
        )
        out = tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        if UPPER:
            words = words >> 16
        out = (words & 255) | ((words & 0xFF00) << 8)
    return out


@triton.jit
def _exp2(x, CUDA: tl.constexpr):
    """Subnormal results flushed: the care for them makes the loop of the kernel a third longer."""
    if CUDA:
        out = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.exp2(x)
    return out


@triton.jit
def _log2(x, CUDA: tl.constexpr):
    """For 1 to 16; see ``_exp2``."""
    if CUDA:
        out = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.log2(x)
    return out


@triton.jit
def _subnormals(lower, upper):
    """Halves of int32 ``[A, B, W]`` as float16 ``[A, B, 4 W]``: two of ``lower``, two of ``upper``.

    As bits: an integer below 1,024 is that many times 2**-24.
    """
    both = tl.join(lower, upper)
    low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((both >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), [lower.shape[0], lower.shape[1], 4 * lower.shape[2]])


@triton.jit
def _halves(query, channel, real, HALF: tl.constexpr):
    """The low and the high half of the channels of queries, each in the order of ``channel``."""
    at = query + channel[:, None]
    mask = (channel < HALF)[:, None] & real
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add_to_each(zero, query, total):
    """``total [A, TOKENS, G] + zero [A, K] @ query [K, G]``, the same for all tokens.

    By the tensor core, whose matrices have 16 rows at least: those of one block are its tokens.
    """
    zeros = tl.broadcast_to(zero[:, None, :], [zero.shape[0], total.shape[1], zero.shape[1]])
    query = tl.broadcast_to(query[None], [zero.shape[0], zero.shape[1], query.shape[1]])
    return tl.dot(zeros, query, total)


@triton.jit
def _keys4_logits_kernel(
    queries, lookahead, words, scale_zero, blocks, first, end, logits,
    query_row, query_place, query_head,
    words_row, words_head, words_token,
    scale_row, scale_head, scale_part,
    blocks_row, num_blocks, span, softmax_scale,
    TOKENS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    SPLIT: tl.constexpr, CUDA: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    lower = tl.load(first + row).to(tl.int32)
    upper = tl.load(end + row).to(tl.int32)
    begin = tl.program_id(1) * span
    stop = tl.minimum(upper, begin + span)
    begin = tl.maximum(begin, lower // BLOCKS * BLOCKS)
    if begin < stop:
        place = tl.load(lookahead + row).to(tl.int64)
        member = tl.arange(0, GROUP_PADDED)
        real = (member < GROUP)[None, :]
        query = queries + row * query_row + place * query_place
        query += (head * GROUP + member)[None, :] * query_head

        # Divided by the power of 2 in the largest, so that scale * query never overflows float16.
        low_query, high_query = _halves(query, _dealt(HALF_PADDED, 4), real, HALF)
        low_other, high_other = _halves(query, _dealt(HALF_PADDED, 2), real, HALF)
        largest = tl.maximum(tl.max(tl.abs(low_query), axis=0), tl.max(tl.abs(high_query), axis=0))
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        power = exponent.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[None, :]
        low_query, high_query = low_query * inverse, high_query * inverse
        low_other, high_other = low_other * inverse, high_other * inverse
        low_main, high_main = low_other.to(tl.float16), high_other.to(tl.float16)
        low_rest = (low_other - low_main.to(tl.float32)).to(tl.float16)
        high_rest = (high_other - high_main.to(tl.float32)).to(tl.float16)
        if not SPLIT:
            low_query, high_query = low_query.to(tl.float16), high_query.to(tl.float16)
        # Logits in powers of 2.
        factor = (power * (softmax_scale * 1.4426950408889634))[None, None, :]

        heads = tl.num_programs(0) * GROUP
        out = logits + (row * heads + head * GROUP + member)[None, :] * num_blocks
        token = tl.arange(0, TOKENS)
        word = tl.arange(0, HALF_PADDED // 4)
        channel = tl.arange(0, HALF_PADDED)
        for start in tl.range(begin, stop, BLOCKS, num_stages=STAGES):
            block = start + tl.arange(0, BLOCKS)
            candidate = (block >= lower) & (block < upper)
            digest = tl.load(blocks + row * blocks_row + block, mask=candidate, other=0)
            digest = digest.to(tl.int64)
            at = words + (digest * words_row + head * words_head)[:, None, None]
            at += token[None, :, None] * words_token + word[None, None, :]
            beside = scale_zero + (digest * scale_row + head * scale_head)[:, None]
            beside += channel[None, :]
            known, inside = candidate[:, None, None], candidate[:, None]
            if HALF < HALF_PADDED:
                known &= (word < HALF // 4)[None, None, :]
                inside &= (channel < HALF)[None, :]
            packed = tl.load(at, mask=known, other=0)
            low_scale = _deal(tl.load(beside, mask=inside, other=0.0), 4)
            high_scale = _deal(tl.load(beside + HALF, mask=inside, other=0.0), 4)
            low_zero = _deal(tl.load(beside + scale_part, mask=inside, other=0.0), 2)
            high_zero = _deal(tl.load(beside + scale_part + HALF, mask=inside, other=0.0), 2)

            packed = _deal(tl.reshape(packed, [BLOCKS * TOKENS, HALF_PADDED // 4]), 1)
            packed = tl.reshape(packed, [BLOCKS, TOKENS, HALF_PADDED // 4])
            x, y = _two_bytes(packed, False, CUDA), _two_bytes(packed, True, CUDA)
            low_weight = (low_scale[:, :, None] * low_query[None]).to(tl.float16)
            high_weight = (high_scale[:, :, None] * high_query[None]).to(tl.float16)
            low = tl.dot(_subnormals(x & 0x000F000F, y & 0x000F000F), low_weight)
            # High nibbles where they are: 16 times too large.
            high = tl.dot(_subnormals(x & 0x00F000F0, y & 0x00F000F0), high_weight)
            base = tl.zeros([BLOCKS, TOKENS, GROUP_PADDED], tl.float32)
            base = _add_to_each(low_zero, low_main, base)
            base = _add_to_each(high_zero, high_main, base)
            if SPLIT:
                base = _add_to_each(low_zero, low_rest, base)
                base = _add_to_each(high_zero, high_rest, base)
            logit = (low * 2.0**24 + (high * 2.0**20 + base)) * factor
            top = tl.max(logit, axis=1)
            total = tl.sum(_exp2(logit - top[:, None, :], CUDA), axis=1)
            mass = (top + _log2(total, CUDA)) * 0.6931471805599453
            tl.store(out + block[:, None], mass, mask=candidate[:, None] & real)
