"""Digests of tiles in plain PyTorch: min and max of the keys, or the keys in 4 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT16_MAX = torch.finfo(torch.float16).max


class Keys4(NamedTuple):
    """Keys of blocks in 4 bits, asymmetric, with one scale and zero per block, KV head and channel.

    Key of token ``b``, channel ``d``: ``code[b, d] * scale[d] + zero[d]``. Bytes as a share of a
    bf16 tile: ``1/8 + 1/B``, which is 3/16 at 16 tokens per block, whatever the head dim.

    By channel because the keys of one block are much alike in a channel and channels differ a lot:
    on post-RoPE keys of a small Llama model the relative error of ``q.k`` is .02, against .06 to
    .08 with one scale per token (``1/8 + 1/D`` of a tile), and the scale and zero fold into the
    query.

    Attributes:
        codes: uint8 ``[..., B, D/2]``; byte ``j`` holds channel ``j`` in its low nibble and channel
            ``j + D/2`` in its high nibble.
        scale_zero: float16 ``[..., 2, D]``; index 0 is the scale, never negative, index 1 the zero.
    """

    codes: Tensor
    scale_zero: Tensor


def build_minmax(tiles: Tensor) -> Tensor:
    """Element-wise minimum and maximum of the keys of each tile.

    Args:
        tiles: ``[..., B, 2D]``, keys in the first ``D`` elements; any float dtype, ``B >= 1``.

    Returns:
        ``[..., 2, D]`` in the dtype of ``tiles``: index 0 the minimum over the tokens, 1 the
        maximum. A NaN key makes both NaN in its channel.

    Raises:
        ValueError: the last dimension is odd, so it cannot be keys and values of one size.
    """
    keys = _keys(tiles)
    return torch.stack([keys.amin(-2), keys.amax(-2)], dim=-2)


def build_keys4(tiles: Tensor) -> Keys4:
    """Quantise the keys of each tile to 4 bits.

    In float32, per channel over the ``B`` tokens, min and max held to float16's +-65,504:
    ``zero = float16(min)``, ``scale = float16((max - min) / 15)``, both rounded to nearest even;
    ``code = clamp(floor((key - zero) / scale + 0.5), 0, 15)`` with the rounded zero and scale and
    IEEE division. Where ``scale`` is 0 (a constant channel, or one whose range is below float16)
    the codes are 0. A constant channel comes back as ``float16(key)``: exact for float16 keys and
    for every bf16 key between 2**-14 and 65,504 in size.

    Args:
        tiles: ``[..., B, 2D]``, keys in the first ``D`` elements; any float dtype, ``B >= 1``.

    Returns:
        Codes and scales of the leading shape of ``tiles``. Finite for finite or infinite keys; a
        NaN key makes scale and zero NaN in its channel (codes 0), so that reading what nobody wrote
        shows.

    Raises:
        ValueError: the last dimension is odd, or ``D`` is odd and two codes cannot share a byte.
    """
    keys = _keys(tiles)
    half = keys.shape[-1] // 2
    if keys.shape[-1] % 2:
        raise ValueError(
            f"4-bit keys need an even head dim, two codes a byte; found {keys.shape[-1]}. "
            "Use the min/max digest for this model."
        )
    keys = keys.to(torch.float32)
    low = keys.amin(-2).clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    high = keys.amax(-2).clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    # A tensor, for CUDA divides by a number by multiplying with its inverse.
    levels = torch.full_like(high, 15)
    scale_zero = torch.stack([(high - low) / levels, low], dim=-2).to(torch.float16)
    scale, zero = scale_zero.to(torch.float32).unsqueeze(-2).unbind(-3)
    # In place: fresh memory for every operation costs a CPU more than the arithmetic.
    steps = (keys - zero).div_(scale).add_(0.5).floor_().clamp_(0, 15)
    codes = steps.masked_fill_(~(scale > 0), 0).to(torch.uint8)
    return Keys4(codes[..., :half] | codes[..., half:] << 4, scale_zero)


def dequantize_keys4(digest: Keys4) -> Tensor:
    """Keys that a 4-bit digest stands for.

    Args:
        digest: codes ``[..., B, D/2]`` and scale_zero ``[..., 2, D]``.

    Returns:
        ``[..., B, D]`` float32: ``code * scale + zero``.
    """
    scale, zero = digest.scale_zero.to(torch.float32).unsqueeze(-2).unbind(-3)
    codes = torch.cat([digest.codes & 15, digest.codes >> 4], dim=-1)
    return codes * scale + zero


def write_minmax(cache: Tensor, source_index: Tensor, digests: Tensor, dest_index: Tensor) -> None:
    """``build_minmax`` of blocks of one layer, into rows of a digest pool, in place.

    Args:
        cache: ``[MB, H, B, 2D]``, keys in the first ``D`` elements of a tile; any strides, last
            dimension contiguous.
        source_index: integer ``[n]``, block of ``cache``; -1 where there is none.
        digests: ``[capacity, H, 2, D]`` in the dtype of ``cache``, such as one layer of a pool of
            ``[capacity, layers, H, 2, D]``; last dimension contiguous.
        dest_index: integer ``[n]``, row of ``digests``, each at most once; -1 where there is none.
    """
    used = (source_index >= 0) & (dest_index >= 0)
    digests[dest_index[used]] = build_minmax(cache[source_index[used]])


def write_keys4(cache: Tensor, source_index: Tensor, digests: Keys4, dest_index: Tensor) -> None:
    """``build_keys4`` of blocks of one layer, into rows of a digest pool, in place.

    Args:
        cache: ``[MB, H, B, 2D]`` as in ``write_minmax``, ``D`` even.
        source_index: integer ``[n]``, block of ``cache``; -1 where there is none.
        digests: codes ``[capacity, H, B, D/2]`` and scale_zero ``[capacity, H, 2, D]``, each with
            its last dimension contiguous.
        dest_index: integer ``[n]``, row of ``digests``, each at most once; -1 where there is none.
    """
    used = (source_index >= 0) & (dest_index >= 0)
    built = build_keys4(cache[source_index[used]])
    digests.codes[dest_index[used]] = built.codes
    digests.scale_zero[dest_index[used]] = built.scale_zero


def _keys(tiles: Tensor) -> Tensor:
    """Key half ``[..., B, D]`` of tiles ``[..., B, 2D]``."""
    if tiles.shape[-1] % 2:
        raise ValueError(
            f"tiles end in K and V of one size, so the last dimension must be even; "
            f"found shape {list(tiles.shape)}"
        )
    return tiles[..., : tiles.shape[-1] // 2]
