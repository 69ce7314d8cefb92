"""Sizes against tensors of those shapes."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from oasiskv.core.geometry import KVGeometry

SHAPES = [
    KVGeometry(3, 2, 6, 8, dtype=torch.float32),
    KVGeometry(1, 1, 1, 80, dtype=torch.bfloat16),
    KVGeometry(2, 4, 4, 6, block_tokens=5, dtype=torch.float16),
]


def bytes_of(*shape, dtype):
    return torch.empty(shape, dtype=dtype).untyped_storage().nbytes()


@pytest.mark.parametrize("geometry", SHAPES)
def test_bytes_are_those_of_tensors(geometry):
    layers, heads, tile = geometry.num_layers, geometry.num_kv_heads, geometry.tile_shape
    assert tile == (geometry.block_tokens, 2 * geometry.head_dim)
    assert geometry.tile_bytes == bytes_of(*tile, dtype=geometry.dtype)
    assert geometry.layer_block_bytes == bytes_of(heads, *tile, dtype=geometry.dtype)
    assert geometry.block_bytes == bytes_of(layers, heads, *tile, dtype=geometry.dtype)
    assert geometry.token_bytes == bytes_of(
        layers, heads, 2 * geometry.head_dim, dtype=geometry.dtype
    )


def test_a_tile_of_the_common_model_is_8_kib():
    assert KVGeometry(32, 8, 32, 128).tile_bytes == 8192


@pytest.mark.parametrize(("heads", "query_heads", "group"), [(2, 6, 3), (1, 1, 1), (8, 32, 4)])
def test_group_is_query_heads_per_kv_head(heads, query_heads, group):
    assert KVGeometry(1, heads, query_heads, 8).group == group


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for_counts_the_open_block(tokens, blocks):
    assert SHAPES[0].blocks_for(tokens) == blocks


def test_geometry_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SHAPES[0].head_dim = 16
