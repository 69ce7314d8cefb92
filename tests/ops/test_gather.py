"""Tile copies against plain loops."""

import math

import pytest
import torch

from oasiskv.ops.gather.reference import gather_tiles


def make(blocks, heads, tokens, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(blocks + heads)
    return torch.randn(blocks, heads, tokens, width, generator=generator).to(dtype)


def make_pairs(heads, places, sources, dests, used, seed=0):
    """Random pairs, each head its own, about ``used`` of them filled; no destination twice."""
    generator = torch.Generator().manual_seed(seed)
    source_index = torch.randint(sources, (heads, places), generator=generator)
    dest_index = torch.stack(
        [torch.randperm(dests, generator=generator)[:places] for _ in range(heads)]
    )
    free = torch.rand(heads, places, generator=generator) >= used
    return source_index.masked_fill(free, -1), dest_index.masked_fill(free, -1)


def copy_by_loop(source, source_index, dest, dest_index):
    copied, moved = dest.clone(), 0
    for head in range(source_index.shape[0]):
        for place in range(source_index.shape[1]):
            if source_index[head, place] >= 0:
                tile = source[source_index[head, place], head]
                copied[dest_index[head, place], head] = tile
                moved += tile.numel() * tile.element_size()
    return copied, moved


def same_bits(a, b):
    """Equal with NaN equal to NaN: free memory must stay as it was."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)) and torch.equal(
        a.isnan(), b.isnan()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("used", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("blocks", "heads", "places", "tokens", "width"),
    [(9, 3, 4, 16, 128), (5, 1, 5, 7, 10), (12, 4, 1, 1, 2), (6, 2, 0, 16, 160)],
)
def test_gather_equals_loop(blocks, heads, places, tokens, width, used, dtype):
    source = make(blocks, heads, tokens, width, dtype)
    dest = torch.full((7, heads, tokens, width), math.nan, dtype=dtype)
    source_index, dest_index = make_pairs(heads, places, blocks, 7, used)
    expected, moved = copy_by_loop(source, source_index, dest, dest_index)
    kept = source.clone()
    assert gather_tiles(source, source_index, dest, dest_index) == moved
    assert same_bits(dest, expected)
    assert torch.equal(source, kept)


def test_layer_views_of_larger_tensors():
    """A layer of a store with blocks outermost, into one of blocks with layers outermost."""
    store = make(8, 5 * 2, 16, 12).reshape(8, 5, 2, 16, 12)
    hot = torch.full((3, 6, 2, 16, 12), math.nan)
    source, dest = store[:, 3], hot[1]
    assert not source.is_contiguous()
    source_index, dest_index = make_pairs(2, 4, 8, 6, 0.8, seed=1)
    expected, moved = copy_by_loop(source, source_index, dest, dest_index)
    assert moved > 0
    assert gather_tiles(source, source_index, dest, dest_index) == moved
    assert same_bits(hot[1], expected)
    assert bool(hot[0].isnan().all())
    assert bool(hot[2].isnan().all())


def test_dest_may_be_strided_too():
    wide = torch.full((4, 2, 16, 24), math.nan)
    dest = wide[..., ::2]
    source = make(3, 2, 16, 12)
    index = torch.tensor([[2, -1], [0, 1]])
    expected, _ = copy_by_loop(source, index, dest, index)
    gather_tiles(source, index, dest, index)
    assert same_bits(wide[..., ::2], expected)
    assert bool(wide[..., 1::2].isnan().all())


def test_offsets_past_two_to_the_31_elements():
    """A view whose block stride puts block 3 past 2**31 elements; memory is touched only there."""
    stride = 2**30
    storage = torch.empty(3 * stride + 2 * 4 * 6, dtype=torch.uint8)
    source = storage.as_strided((4, 2, 4, 6), (stride, 24, 6, 1))
    source[3] = torch.arange(48, dtype=torch.uint8).reshape(2, 4, 6)
    dest = torch.zeros(2, 2, 4, 6, dtype=torch.uint8)
    moved = gather_tiles(source, torch.tensor([[3], [3]]), dest, torch.tensor([[1], [0]]))
    assert moved == 48
    assert torch.equal(dest[1, 0], source[3, 0])
    assert torch.equal(dest[0, 1], source[3, 1])


def test_different_tiles_are_refused():
    index = torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"found torch.float32 .* and torch.bfloat16"):
        gather_tiles(torch.zeros(1, 1, 2, 4), index, torch.zeros(1, 1, 2, 4).bfloat16(), index)
    with pytest.raises(ValueError, match=r"found .* \[1, 2, 4\] and .* \[1, 2, 6\]"):
        gather_tiles(torch.zeros(1, 1, 2, 4), index, torch.zeros(1, 1, 2, 6), index)


def test_half_a_pair_is_refused_before_anything_moves():
    dest = torch.zeros(2, 1, 2, 4)
    with pytest.raises(ValueError, match="neither; 1 are not so"):
        gather_tiles(torch.ones(2, 1, 2, 4), torch.tensor([[0, 1]]), dest, torch.tensor([[0, -1]]))
    assert bool((dest == 0).all())
