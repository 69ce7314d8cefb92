"""Tile copies in Triton: between HBM and pinned host memory, or within HBM."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.gather.reference import check_same_tiles

# Bytes whose reads a program has under way at once. What the link holds between request and answer
# is under 128 KiB, so that 4 programs fill it; more only take more from the kernels beside them.
_BYTES_AT_ONCE = 2**15
_MOST_TILES = 8
_LINK_PROGRAMS, _HBM_PROGRAMS = 4, 64
_PAIRS_AT_ONCE = 1024
_WARPS = 8


def gather_rows(
    source: Tensor,
    source_index: Tensor,
    dest: Tensor,
    dest_index: Tensor,
    source_blocks: Tensor | None = None,
    dest_blocks: Tensor | None = None,
    *,
    programs: int | None = None,
) -> Tensor:
    """As ``reference.gather_rows``, without synchronisation; ``R``, ``H`` and ``C`` are maxima.

    Each program finds the pairs that hold something, keeps every ``programs``-th of them, and
    copies their tiles. So the work is even whatever the -1 entries, and one launch is enough.

    Floor: tiles moved times their bytes, over the bandwidth of the link (55 GB/s for pinned memory
    and PCIe 5: 0.15 us a tile of 8 KiB), or twice the bytes over the bandwidth of HBM.

    Args:
        source: as in the reference, each tile contiguous; in host memory it must be pinned.
        source_index: as in the reference, any strides.
        dest: as in the reference, each tile contiguous; in host memory it must be pinned.
        dest_index: as in the reference, any strides.
        source_blocks: as in the reference, last dimension contiguous.
        dest_blocks: as in the reference, last dimension contiguous.
        programs: how many run at once, each of which keeps a multiprocessor from the kernels beside
            it; None: as few as fill the link to the host, more within HBM.

    Raises:
        ValueError: dtype or tile shape differ, or a tile is not contiguous.
    """
    check_same_tiles(source, dest)
    words = _word_dtype(source, dest)
    source, dest = _as_words("source", source, words), _as_words("dest", dest, words)
    num_rows, num_heads, width = source_index.shape
    device = source_index.device
    if programs is None:
        within = source.device == dest.device
        programs = _HBM_PROGRAMS if within else _LINK_PROGRAMS
    tile_bytes = source.shape[2] * source.element_size()
    pairs = num_rows * num_heads * width
    moved = torch.empty((), dtype=torch.int64, device=device)
    work = torch.empty(
        (programs, triton.cdiv(pairs, programs), 2), dtype=torch.int64, device=device
    )
    _gather_kernel[(programs,)](
        _pointer(source, device), source_index, _pointer(dest, device), dest_index,
        source_blocks, dest_blocks, work, moved,
        pairs, work.shape[1],
        source.stride(0), source.stride(1), dest.stride(0), dest.stride(1),
        *source_index.stride(), *dest_index.stride(),
        0 if source_blocks is None else source_blocks.stride(0),
        0 if dest_blocks is None else dest_blocks.stride(0),
        HEADS=max(num_heads, 1), WIDTH=max(width, 1),
        WORDS=source.shape[2], WORDS_PADDED=triton.next_power_of_2(source.shape[2]),
        ALIGNED=_alignment(source, dest), TILES=_tiles_at_once(tile_bytes),
        PAIRS=min(_PAIRS_AT_ONCE, triton.next_power_of_2(max(pairs, 1))),
        num_warps=_WARPS,
    )  # fmt: skip
    return moved


def _tiles_at_once(tile_bytes: int) -> int:
    """A power of 2."""
    most = min(_MOST_TILES, _BYTES_AT_ONCE // max(tile_bytes, 1))
    return 1 << max(most.bit_length() - 1, 0)


class _HostPointer:
    """What the kernel needs of a pinned tensor; Triton takes no CPU tensor, but its address."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        """Address, the same on the GPU under unified addressing."""
        return self._tensor.data_ptr()


def _pointer(tensor: Tensor, device: torch.device) -> Tensor | _HostPointer:
    if tensor.device == device:
        return tensor
    if not tensor.is_pinned():
        raise ValueError(f"a tensor on {tensor.device} beside {device} must be pinned")
    return _HostPointer(tensor)


def _word_dtype(source: Tensor, dest: Tensor) -> torch.dtype:
    """Largest integer of which tiles and their offsets are whole multiples, 4 bytes at most."""
    size = source.element_size()
    numbers = [source.shape[2] * source.shape[3] * size]
    for tensor in (source, dest):
        numbers += [tensor.stride(0) * size, tensor.stride(1) * size, tensor.data_ptr()]
    for dtype in (torch.int32, torch.int16):
        if size <= dtype.itemsize and not any(number % dtype.itemsize for number in numbers):
            return dtype
    return torch.int8 if size == 1 else source.dtype


def _alignment(source: Tensor, dest: Tensor) -> int:
    """Largest power of 2 up to 16, in words, that divides every offset of a tile.

    Offsets pass through memory, so the compiler cannot find out that they allow 16-byte accesses.
    """
    strides = (*source.stride()[:2], *dest.stride()[:2])
    return math.gcd(16, *strides)


def _as_words(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``[NB, H, B, 2D]`` -> ``[NB, H, words]``, no copy."""
    num_blocks, num_heads, tokens, width = tensor.shape
    if tensor.stride()[2:] != (width, 1):
        raise ValueError(f"tiles of {name} must be contiguous; found strides {tensor.stride()}")
    strides = (tensor.stride(0), tensor.stride(1), 1)
    flat = tensor.as_strided((num_blocks, num_heads, tokens * width), strides)
    return flat.view(dtype)


@triton.jit
def _gather_kernel(
    source, source_index, dest, dest_index, source_blocks, dest_blocks, work, moved,
    pairs, work_pairs,
    source_block, source_head, dest_block, dest_head,
    source_index_row, source_index_head, source_index_place,
    dest_index_row, dest_index_head, dest_index_place,
    source_blocks_row, dest_blocks_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PADDED: tl.constexpr,
    ALIGNED: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    work += program.to(tl.int64) * work_pairs * 2
    total = program * 0
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        place = pair % WIDTH
        head = (pair // WIDTH % HEADS).to(tl.int64)
        row = (pair // (WIDTH * HEADS)).to(tl.int64)
        known = pair < pairs
        at = row * source_index_row + head * source_index_head + place * source_index_place
        take = tl.load(source_index + at, mask=known, other=-1).to(tl.int64)
        at = row * dest_index_row + head * dest_index_head + place * dest_index_place
        put = tl.load(dest_index + at, mask=known, other=-1).to(tl.int64)
        used = (take >= 0) & (put >= 0)
        rank = total + tl.cumsum(used.to(tl.int32), axis=0) - 1
        mine = used & (rank % programs == program)
        if source_blocks is not None:
            take = tl.load(source_blocks + row * source_blocks_row + take, mask=mine, other=0)
        if dest_blocks is not None:
            put = tl.load(dest_blocks + row * dest_blocks_row + put, mask=mine, other=0)
        at = work + rank // programs * 2
        tl.store(at, take.to(tl.int64) * source_block + head * source_head, mask=mine)
        tl.store(at + 1, put.to(tl.int64) * dest_block + head * dest_head, mask=mine)
        total += tl.sum(used.to(tl.int32), axis=0)
    if program == 0:
        tl.store(moved, total.to(tl.int64))
    tl.debug_barrier()

    count = (total - program + programs - 1) // programs
    word = tl.arange(0, WORDS_PADDED)[None, :]
    for start in range(0, count, TILES):
        tile = start + tl.arange(0, TILES)
        left = tile < count
        take = tl.multiple_of(tl.load(work + tile * 2, mask=left, other=0), ALIGNED)
        put = tl.multiple_of(tl.load(work + tile * 2 + 1, mask=left, other=0), ALIGNED)
        mask = left[:, None] & (word < WORDS)
        words = tl.load(source + take[:, None] + word, mask=mask)
        tl.store(dest + put[:, None] + word, words, mask=mask)
