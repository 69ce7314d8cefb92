"""Tile copies for several requests: reference and kernel against a plain loop."""

import math
from functools import partial

import pytest
import torch

from backends import BACKENDS, DEVICE, far_view, load_op, same_bits

both = pytest.mark.parametrize("backend", BACKENDS)
kernel_only = pytest.mark.parametrize("backend", BACKENDS[1:])
# Where the source is: beside the destination, or in pinned host memory.
PLACES = ["device", "host"] if DEVICE.type == "cuda" else ["device"]

# rows, KV heads, places, tokens, width
SIZES = [(3, 2, 4, 16, 128), (1, 1, 1, 7, 10), (5, 3, 2, 16, 160), (2, 4, 3, 1, 2)]


def make_case(size, used, seed=0):
    """Sources and destinations by the row's own numbering; no destination twice."""
    rows, heads, places = size[:3]
    generator = torch.Generator().manual_seed(seed)
    source_index = torch.randint(6, (rows, heads, places), generator=generator)
    order = torch.stack(
        [torch.randperm(6, generator=generator)[:places] for _ in range(rows * heads)]
    )
    free = torch.rand(rows, heads, places, generator=generator) >= used
    source_blocks = torch.randint(9, (rows, 6), generator=generator, dtype=torch.int32)
    dest_blocks = torch.randperm(6 * rows, generator=generator).reshape(rows, 6)
    dest_index = order.reshape(rows, heads, places).masked_fill(free, -1)
    return source_index.masked_fill(free, -1), dest_index, source_blocks, dest_blocks


def copy_by_loop(source, source_index, dest, dest_index, source_blocks, dest_blocks):
    copied, moved = dest.clone(), 0
    for row in range(source_index.shape[0]):
        for head in range(source_index.shape[1]):
            for place in range(source_index.shape[2]):
                block, slot = source_index[row, head, place], dest_index[row, head, place]
                if block >= 0 and slot >= 0:
                    block = block if source_blocks is None else source_blocks[row, block]
                    slot = slot if dest_blocks is None else dest_blocks[row, slot]
                    copied[slot, head] = source[block, head]
                    moved += 1
    return copied, moved


def load_gather(backend):
    """With few programs: each looks at all pairs, which takes the interpreter long."""
    gather = load_op("gather", "gather_rows", backend)
    return gather if backend == "reference" else partial(gather, programs=5)


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("used", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
@both
def test_gather_equals_loop(size, used, dtype, place, backend):
    """From one layer of a store, pinned where CUDA is there, into blocks of an engine."""
    rows, heads, _, tokens, width = size
    store = torch.randn(9, 3, heads, tokens, width, generator=torch.Generator().manual_seed(1))
    store = (store * 20).to(dtype) if dtype.is_floating_point else store.mul(20).abs().to(dtype)
    dest = torch.full((6 * rows, heads, tokens, width), 77, dtype=dtype)
    if dtype.is_floating_point:
        dest.fill_(math.nan)
    pairs, blocks = make_case(size, used)[:2], make_case(size, used)[2:]
    expected, moved = copy_by_loop(store[:, 1], pairs[0], dest, pairs[1], *blocks)
    store = store.pin_memory() if place == "host" else store.to(DEVICE)
    kept, got = store.clone(), dest.to(DEVICE)
    gather = load_gather(backend)
    take, put = on_device(*pairs)
    assert int(gather(store[:, 1], take, got, put, *on_device(*blocks))) == moved
    assert same_bits(got.float().cpu(), expected.float())
    assert same_bits(store.float(), kept.float())


@both
def test_blocks_by_their_own_number_and_write_through(backend):
    """From an engine's blocks into the store, all heads alike: an index that is expanded."""
    cache = torch.randn(5, 2, 16, 24, device=DEVICE)
    store = torch.full((4, 3, 2, 16, 24), math.nan)
    store = store.pin_memory() if DEVICE.type == "cuda" else store
    source, dest = torch.tensor([3, -1, 0], device=DEVICE), torch.tensor([2, -1, 3], device=DEVICE)
    gather = load_gather(backend)
    moved = gather(cache, source.expand(1, 2, 3), store[:, 2], dest.expand(1, 2, 3))
    assert int(moved) == 4
    assert torch.equal(store[2, 2], cache[3].cpu())
    assert torch.equal(store[3, 2], cache[0].cpu())
    assert bool(store[:2].isnan().all())
    assert bool(store[:, :2].isnan().all())


@both
def test_half_a_pair_moves_nothing(backend):
    dest = torch.zeros(2, 1, 2, 4, device=DEVICE)
    source = torch.ones(2, 1, 2, 4, device=DEVICE)
    take, put = torch.tensor([[[0, 1, -1]]], device=DEVICE), torch.tensor([[[0, -1, 1]]])
    gather = load_gather(backend)
    assert int(gather(source, take, dest, put.to(DEVICE))) == 1
    assert dest.sum((1, 2, 3)).tolist() == [8, 0]


@pytest.mark.parametrize("programs", [1, 3, 64])
@kernel_only
def test_any_number_of_programs(programs, backend):
    size = (4, 2, 5, 16, 8)
    source_index, dest_index, source_blocks, dest_blocks = make_case(size, 0.7)
    source = torch.randn(9, 2, 16, 8)
    dest = torch.full((24, 2, 16, 8), math.nan)
    case = (source_index, dest, dest_index, source_blocks, dest_blocks)
    expected, moved = copy_by_loop(source, *case)
    source, take, got, put, *blocks = on_device(source, *case)
    gather = load_op("gather", "gather_rows", backend)
    assert int(gather(source, take, got, put, *blocks, programs=programs)) == moved
    assert same_bits(got.cpu(), expected)


@both
def test_more_pairs_than_a_program_looks_at_together(backend):
    rows, heads, places = 20, 4, 30
    source = torch.randn(50, heads, 1, 4, device=DEVICE)
    dest = torch.full((rows * places, heads, 1, 4), math.nan, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    take = torch.randint(-1, 50, (rows, heads, places), generator=generator)
    put = torch.arange(rows * places).reshape(rows, 1, places).expand(rows, heads, places)
    put = put.masked_fill(take < 0, -1)
    take, put = on_device(take, put)
    moved = load_gather(backend)(source, take, dest, put)
    assert int(moved) == int((take >= 0).sum()) > 1024
    for row, head, place in (take >= 0).nonzero().tolist():
        tile = source[take[row, head, place], head]
        assert torch.equal(dest[put[row, head, place], head], tile)
    assert int(dest.isnan().sum()) == 4 * int((take < 0).sum())


@both
def test_no_pairs(backend):
    none = torch.empty(2, 3, 0, dtype=torch.int64, device=DEVICE)
    tiles = torch.full((2, 3, 16, 8), math.nan, device=DEVICE)
    assert int(load_gather(backend)(tiles.clone(), none, tiles, none)) == 0
    assert bool(tiles.isnan().all())


@both
def test_v50427_offsets_past_two_to_the_31_elements(backend, monkeypatch):
    """With tiles of an odd number of bytes, which cannot be counted in larger words."""
    source = far_view((4, 2, 5, 5), 2**30, torch.uint8, monkeypatch)
    dest = far_view((3, 2, 5, 5), 2**30 + 512, torch.uint8, monkeypatch)
    source[3] = torch.arange(50, dtype=torch.uint8, device=DEVICE).reshape(2, 5, 5)
    dest[1:] = 0
    take = torch.tensor([[[3], [3]]], device=DEVICE)
    put = torch.tensor([[[2], [1]]], device=DEVICE)
    assert int(load_gather(backend)(source, take, dest, put)) == 2
    assert torch.equal(dest[2, 0], source[3, 0])
    assert torch.equal(dest[1, 1], source[3, 1])
    assert int(dest[2, 1].sum()) == int(dest[1, 0].sum()) == 0


@both
def test_different_tiles_are_refused(backend):
    index = torch.tensor([[[0]]], device=DEVICE)
    tile = torch.zeros(1, 1, 2, 4, device=DEVICE)
    gather = load_gather(backend)
    with pytest.raises(ValueError, match=r"found torch.float32 .* and torch.bfloat16"):
        gather(tile, index, tile.bfloat16(), index)
    with pytest.raises(ValueError, match=r"found .* \[1, 2, 4\] and .* \[1, 2, 6\]"):
        gather(tile, index, torch.zeros(1, 1, 2, 6, device=DEVICE), index)


@kernel_only
def test_tiles_that_are_not_contiguous_are_refused(backend):
    index = torch.tensor([[[0]]], device=DEVICE)
    wide = torch.zeros(1, 1, 2, 8, device=DEVICE)
    gather = load_gather(backend)
    with pytest.raises(ValueError, match="tiles of source must be contiguous"):
        gather(wide[..., ::2], index, torch.zeros(1, 1, 2, 4, device=DEVICE), index)
