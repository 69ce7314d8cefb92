"""Checksums of the tiles of a store, and what was found not to match its own."""

from collections.abc import Sequence

import torch

from oasiskv.core.geometry import KVGeometry

_SEED = 0
# Products of so many tiles at a time stay in a CPU's cache.
_TILES_AT_ONCE = 64


def tile_checksums(tiles: torch.Tensor) -> torch.Tensor:
    """A checksum of each tile: the sum of its 32-bit words, each times an odd 64-bit weight.

    The sum is taken modulo 2**64. A change of one word, any bits of it, always changes it; a change
    of several words goes unseen with a chance of 2**-32 at most (multilinear hashing,
    https://arxiv.org/abs/1202.4961). It stands against accidents, not against an attacker.

    Args:
        tiles: ``[..., block_tokens, 2 * head_dim]``, of a multiple of 4 bytes, of any dtype.

    Returns:
        int64 ``[...]``, on the device of ``tiles``.
    """
    words = tiles.contiguous().flatten(-2).view(torch.int32)
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.randint(-(2**63), 2**63 - 1, words.shape[-1:], generator=generator) | 1
    weights = weights.to(words.device)
    parts = torch.split(words.view(-1, len(weights)), _TILES_AT_ONCE)
    return torch.cat([(part * weights).sum(dim=-1) for part in parts]).view(tiles.shape[:-2])


class TileChecksums:
    """What each tile of a store summed up to when it was written.

    Args:
        geometry: sizes of a block.
        capacity_blocks: blocks of the store.

    Attributes:
        damaged_tiles: tiles found damaged, each time they were asked for.
        damaged_blocks: store blocks with such a tile that have not been written again.
    """

    def __init__(self, geometry: KVGeometry, capacity_blocks: int) -> None:
        shape = (capacity_blocks, geometry.num_layers, geometry.num_kv_heads)
        self._sums = torch.zeros(shape, dtype=torch.int64)
        self.damaged_tiles = 0
        self.damaged_blocks: set[int] = set()

    def note(self, blocks: Sequence[int], tiles: torch.Tensor) -> None:
        """Blocks are written.

        Args:
            blocks: store blocks.
            tiles: ``[len(blocks), layers, heads, block_tokens, 2 * head_dim]``.
        """
        self._sums[list(blocks)] = tile_checksums(tiles).cpu()
        self.damaged_blocks.difference_update(blocks)

    def damaged(self, pool: torch.Tensor, layer: int, source_index: torch.Tensor) -> torch.Tensor:
        """Which tiles are not what was written.

        Args:
            pool: all tiles, ``[blocks, layers, heads, block_tokens, 2 * head_dim]``.
            layer: which layer's.
            source_index: int64 ``[heads, n]`` store blocks, -1 for none.

        Returns:
            bool ``[heads, n]``.
        """
        source = source_index.cpu()
        head, place = (source >= 0).nonzero(as_tuple=True)
        blocks = source[head, place]
        wrong = tile_checksums(pool[blocks, layer, head]) != self._sums[blocks, layer, head]
        self.damaged_tiles += int(wrong.sum())
        self.damaged_blocks.update(blocks[wrong].tolist())
        found = torch.zeros_like(source, dtype=torch.bool)
        found[head, place] = wrong
        return found
