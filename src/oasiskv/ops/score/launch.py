"""What the kernels of the score op share before they are launched."""

import torch
from torch import Tensor

from oasiskv.ops.score.reference import group_size

_PROGRAMS = 1056
"""As many programs as keep an H200 busy: 8 for each of its 132 multiprocessors."""


def fit_span(num_blocks: int, pairs: int, tile_blocks: int, most_tiles: int) -> int:
    """Blocks of a row that one program takes.

    Long spans are best where there are many rows: the query is read and prepared once, and loads
    are on their way all the time. Where there are few, spans are as short as makes ``_PROGRAMS`` of
    them, or one tile.

    Args:
        num_blocks: ``N``, a maximum.
        pairs: rows times KV heads.
        tile_blocks: blocks that a program takes at a time.
        most_tiles: tiles of the longest span.

    Returns:
        A multiple of ``tile_blocks``.
    """
    programs = max(1, _PROGRAMS // pairs)
    tiles = -(-num_blocks // (tile_blocks * programs))
    return tile_blocks * min(tiles, most_tiles)


def empty_logits(queries: Tensor, num_kv_heads: int, blocks: Tensor) -> Tensor:
    """Float32 ``[R, Hq, N]``, not initialised.

    Raises:
        ValueError: the heads do not divide.
    """
    num_rows, _, num_query_heads, _ = queries.shape
    group_size(num_query_heads, num_kv_heads)
    shape = (num_rows, num_query_heads, blocks.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=queries.device)
