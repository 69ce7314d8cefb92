"""Moving tiles from one set of blocks into another, in plain PyTorch."""

import torch
from torch import Tensor


def gather_tiles(source: Tensor, source_index: Tensor, dest: Tensor, dest_index: Tensor) -> int:
    """Copy tiles in place: ``dest[dest_index[h, c], h] = source[source_index[h, c], h]``.

    Pairs whose two indices are -1 are left out. Pairs of one call never share a destination
    (contract, not checked). Both tensors may be strided views, such as one layer of a larger store;
    offsets are int64, so past 2**31 elements too.

    Args:
        source: ``[NB, H, B, 2D]``, on any device, pinned host memory included.
        source_index: int64 ``[H, C]``, block of ``source``, or -1.
        dest: ``[MB, H, B, 2D]``, same dtype and tile as ``source``, on any device.
        dest_index: int64 ``[H, C]``, block of ``dest``, or -1 where ``source_index`` is.

    Returns:
        Bytes moved. When it returns, the copy is done or ordered on the current stream of ``dest``.

    Raises:
        ValueError: dtype or tile shape of ``dest`` and ``source`` differ, or only one index of a
            pair is negative.
    """
    check_same_tiles(source, dest)
    source_index, dest_index = source_index.to(source.device), dest_index.to(source.device)
    used = source_index >= 0
    half_pairs = int((used != (dest_index >= 0)).sum())
    if half_pairs:
        raise ValueError(f"both indices of a pair must be -1 or neither; {half_pairs} are not so")
    head, place = used.nonzero(as_tuple=True)
    tiles = source[source_index[head, place], head].to(dest.device)
    dest[dest_index[head, place].to(dest.device), head.to(dest.device)] = tiles
    return tiles.numel() * tiles.element_size()


def gather_rows(
    source: Tensor,
    source_index: Tensor,
    dest: Tensor,
    dest_index: Tensor,
    source_blocks: Tensor | None = None,
    dest_blocks: Tensor | None = None,
) -> Tensor:
    """``gather_tiles`` for the requests of a step, one row each, in place.

    Pairs whose indices are not both at least 0 are left out; pairs of one call never share a
    destination, and no destination is a source (contracts, not checked).

    Args:
        source: ``[NB, H, B, 2D]``, on any device, pinned host memory included.
        source_index: integer ``[R, H, C]``: block of ``source``, or, with ``source_blocks``, place
            in the row's ``source_blocks``; -1 for none.
        dest: ``[MB, H, B, 2D]``, same dtype and tile as ``source``, on any device.
        dest_index: integer ``[R, H, C]``: block of ``dest``, or place in the row's ``dest_blocks``;
            -1 for none.
        source_blocks: integer ``[R, any]``, block of ``source`` by the row's own numbering, such as
            the store blocks of a request; None: ``source_index`` is that already.
        dest_blocks: integer ``[R, any]``, block of ``dest`` likewise, such as the slots of a
            request.

    Returns:
        Tiles moved, int64 with no dimension, on the device of the indices. When it returns, the
        copy is done or ordered on the current stream of that device.

    Raises:
        ValueError: dtype or tile shape of ``dest`` and ``source`` differ.
    """
    num_heads = source_index.shape[1]
    used = (source_index >= 0) & (dest_index >= 0)
    sources = _blocks_of(source_index, source_blocks).masked_fill(~used, -1)
    dests = _blocks_of(dest_index, dest_blocks).masked_fill(~used, -1)
    gather_tiles(
        source,
        sources.transpose(0, 1).reshape(num_heads, -1),
        dest,
        dests.transpose(0, 1).reshape(num_heads, -1),
    )
    return used.sum()


def _blocks_of(index: Tensor, blocks: Tensor | None) -> Tensor:
    """int64 ``[R, H, C]``: ``blocks`` ``[R, any]`` at ``index``, anything where that is -1."""
    if blocks is None or not index.numel():
        return index.long()
    rows = torch.arange(len(index), device=index.device)[:, None, None]
    return blocks[rows, index.clamp(min=0).long()].long()


def check_same_tiles(source: Tensor, dest: Tensor) -> None:
    """Refuse two tensors of blocks whose tiles cannot be copied as they are.

    Raises:
        ValueError: dtype or tile shape differ.
    """
    if source.dtype != dest.dtype or source.shape[1:] != dest.shape[1:]:
        raise ValueError(
            f"source and dest must hold the same tiles; found {source.dtype} "
            f"{list(source.shape[1:])} and {dest.dtype} {list(dest.shape[1:])}"
        )
