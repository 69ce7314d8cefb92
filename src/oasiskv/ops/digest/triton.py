"""Digests in Triton: reads the keys of the blocks where the engine keeps them."""

import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.digest.reference import Keys4
from oasiskv.ops.strides import check_last_dim


def write_minmax(cache: Tensor, source_index: Tensor, digests: Tensor, dest_index: Tensor) -> None:
    """As ``reference.write_minmax``, one program per block and KV head, no synchronisation.

    Floor: keys read and digest written, ``n * H * (B + 2) * D`` elements, over the bandwidth of
    HBM; 5 KiB at ``B = 16, D = 128`` in bf16, that is 1 ns a tile. At less than a few thousand
    tiles the launch is longer.
    """
    check_last_dim(cache=cache, digests=digests)
    num_heads, block_tokens, width = cache.shape[1:]
    _minmax_kernel[(len(source_index), num_heads)](
        cache, source_index, digests, dest_index,
        cache.stride(0), cache.stride(1), cache.stride(2),
        source_index.stride(0), dest_index.stride(0),
        digests.stride(0), digests.stride(1), digests.stride(2),
        TOKENS=block_tokens, TOKENS_PADDED=triton.next_power_of_2(block_tokens),
        DIM=width // 2, DIM_PADDED=triton.next_power_of_2(width // 2),
        num_warps=2,
    )  # fmt: skip


def write_keys4(cache: Tensor, source_index: Tensor, digests: Keys4, dest_index: Tensor) -> None:
    """As ``reference.write_keys4``, bit for bit; one program per block and KV head.

    Floor: keys read and digest written, ``n * H * (2 B D + B D / 2 + 4 D)`` bytes from bf16, over
    the bandwidth of HBM; 5.5 KiB at ``B = 16, D = 128``.
    """
    codes, scale_zero = digests
    check_last_dim(cache=cache, codes=codes, scale_zero=scale_zero)
    num_heads, block_tokens, width = cache.shape[1:]
    if width % 4:
        raise ValueError(
            f"4-bit keys need an even head dim, two codes a byte; found {width // 2}. "
            "Use the min/max digest for this model."
        )
    _keys4_kernel[(len(source_index), num_heads)](
        cache, source_index, codes, scale_zero, dest_index,
        cache.stride(0), cache.stride(1), cache.stride(2),
        source_index.stride(0), dest_index.stride(0),
        codes.stride(0), codes.stride(1), codes.stride(2),
        scale_zero.stride(0), scale_zero.stride(1), scale_zero.stride(2),
        TOKENS=block_tokens, TOKENS_PADDED=triton.next_power_of_2(block_tokens),
        HALF=width // 4, HALF_PADDED=triton.next_power_of_2(width // 4),
        num_warps=2,
    )  # fmt: skip


@triton.jit
def _extremes(keys, mask):
    """Minimum and maximum over the tokens, ``[D]`` float32; both NaN where a key is NaN."""
    # What a maximum of NaN is differs between GPU and interpreter.
    known = mask & (keys == keys)
    bad = tl.max((mask & (keys != keys)).to(tl.int32), axis=0) > 0
    low = tl.min(tl.where(known, keys, float("inf")), axis=0)
    high = tl.max(tl.where(known, keys, float("-inf")), axis=0)
    return tl.where(bad, float("nan"), low), tl.where(bad, float("nan"), high)


@triton.jit
def _minmax_kernel(
    cache, source_index, digests, dest_index,
    cache_block, cache_head, cache_token,
    source_step, dest_step,
    digest_row, digest_head, digest_part,
    TOKENS: tl.constexpr, TOKENS_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(source_index + place * source_step).to(tl.int64)
    dest = tl.load(dest_index + place * dest_step).to(tl.int64)
    if (source >= 0) & (dest >= 0):
        token = tl.arange(0, TOKENS_PADDED)[:, None]
        channel = tl.arange(0, DIM_PADDED)
        mask = (token < TOKENS) & (channel < DIM)[None, :]
        tile = cache + source * cache_block + head * cache_head
        keys = tl.load(tile + token * cache_token + channel[None, :], mask=mask, other=0.0)
        low, high = _extremes(keys.to(tl.float32), mask)
        row = digests + dest * digest_row + head * digest_head + channel
        kind = digests.dtype.element_ty
        tl.store(row, low.to(kind), mask=channel < DIM)
        tl.store(row + digest_part, high.to(kind), mask=channel < DIM)


@triton.jit
def _quantise(keys, mask):
    """Codes ``[B, D]`` int32, scale and zero ``[D]`` float16, as in ``reference.build_keys4``."""
    low, high = _extremes(keys, mask)
    bad = low != low
    low = tl.where(bad, low, tl.minimum(tl.maximum(low, -65504.0), 65504.0))
    high = tl.where(bad, high, tl.minimum(tl.maximum(high, -65504.0), 65504.0))
    scale = tl.math.div_rn(high - low, tl.full(high.shape, 15.0, tl.float32)).to(tl.float16)
    zero = low.to(tl.float16)
    step = scale.to(tl.float32)
    usable = step > 0
    divisor = tl.where(usable, step, 1.0)[None, :] + tl.zeros(keys.shape, tl.float32)
    origin = tl.where(usable, zero.to(tl.float32), 0.0)
    steps = tl.floor(tl.math.div_rn(keys - origin[None, :], divisor) + 0.5)
    steps = tl.minimum(tl.maximum(steps, 0.0), 15.0)
    codes = tl.where(usable[None, :] & mask, steps, 0.0).to(tl.int32)
    return codes, scale, zero


@triton.jit
def _keys4_kernel(
    cache, source_index, codes, scale_zero, dest_index,
    cache_block, cache_head, cache_token,
    source_step, dest_step,
    codes_row, codes_head, codes_token,
    scale_row, scale_head, scale_part,
    TOKENS: tl.constexpr, TOKENS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(source_index + place * source_step).to(tl.int64)
    dest = tl.load(dest_index + place * dest_step).to(tl.int64)
    if (source >= 0) & (dest >= 0):
        token = tl.arange(0, TOKENS_PADDED)[:, None]
        channel = tl.arange(0, HALF_PADDED)
        inside = channel < HALF
        mask = (token < TOKENS) & inside[None, :]
        tile = cache + source * cache_block + head * cache_head
        tile += token * cache_token + channel[None, :]
        # Channel j and channel j + D/2 share a byte, so the halves are quantised side by side.
        first = tl.load(tile, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(tile + HALF, mask=mask, other=0.0).to(tl.float32)
        low, low_scale, low_zero = _quantise(first, mask)
        high, high_scale, high_zero = _quantise(second, mask)
        packed = codes + dest * codes_row + head * codes_head
        packed += token * codes_token + channel[None, :]
        tl.store(packed, (low | (high << 4)).to(tl.uint8), mask=mask)
        row = scale_zero + dest * scale_row + head * scale_head + channel
        tl.store(row, low_scale, mask=inside)
        tl.store(row + HALF, high_scale, mask=inside)
        tl.store(row + scale_part, low_zero, mask=inside)
        tl.store(row + scale_part + HALF, high_zero, mask=inside)
