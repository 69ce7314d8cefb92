"""Sizes of blocks, tiles and digests for one model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the KV cache of the layers that may go sparse.

    Args:
        num_layers: layers with full attention; layers with a sliding window are not counted.
        num_kv_heads: KV heads per layer.
        num_query_heads: query heads per layer, a multiple of ``num_kv_heads``.
        head_dim: elements of one key or value vector.
        block_tokens: tokens of one block.
        dtype: dtype of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def tile_shape(self) -> tuple[int, int]:
        """``[block_tokens, 2 * head_dim]``: K then V of each token."""
        return (self.block_tokens, 2 * self.head_dim)

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile, the unit of transfer."""
        return self.block_tokens * 2 * self.head_dim * self.dtype.itemsize

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, all KV heads."""
        return self.tile_bytes * self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and KV heads."""
        return self.layer_block_bytes * self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token over all layers and KV heads."""
        return self.block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks needed to hold ``tokens`` tokens, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)
