"""The host store: every block accounted for, every tile where it belongs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError, StateError, StoreFullError
from oasiskv.stores.base import Ticket
from oasiskv.stores.host import HostStore

LAYERS, HEADS, CAPACITY = 3, 2, 6


def make_geometry(dtype=torch.float32):
    return KVGeometry(LAYERS, HEADS, HEADS, 4, dtype=dtype)


def make_store(capacity=CAPACITY, dtype=torch.float32):
    return HostStore(make_geometry(dtype), capacity)


def make_tiles(blocks, dtype=torch.float32):
    generator = torch.Generator().manual_seed(blocks)
    shape = (blocks, LAYERS, HEADS, *make_geometry().tile_shape)
    return torch.randn(shape, generator=generator).to(dtype)


def make_dest(blocks=5, dtype=torch.float32):
    return torch.full((blocks, HEADS, *make_geometry().tile_shape), math.nan, dtype=dtype)


def write_ticket(step=0):
    return Ticket("write", "a", 0, step)


def read_ticket(layer=0, step=0):
    return Ticket("read", "a", 0, step, layer)


def test_a_new_store_is_free():
    store = make_store()
    assert (store.capacity_blocks, store.free_blocks) == (CAPACITY, CAPACITY)
    assert store.poll() == []


def test_reserve_hands_out_every_block_once():
    store = make_store()
    assert store.reserve(2) == [0, 1]
    assert store.reserve(0) == []
    assert store.reserve(4) == [2, 3, 4, 5]
    assert store.free_blocks == 0


def test_freed_blocks_can_be_reserved_again():
    store = make_store()
    store.reserve(CAPACITY)
    store.free([4, 1])
    assert store.free_blocks == 2
    assert sorted(store.reserve(2)) == [1, 4]


def test_a_full_store_says_what_is_missing_and_takes_nothing():
    store = make_store()
    store.reserve(4)
    with pytest.raises(StoreFullError) as caught:
        store.reserve(3)
    assert str(caught.value) == (
        "the host store is full: 3 more blocks are needed, 2 of 6 are free; raise host_gib "
        f"(one block is {make_geometry().block_bytes} bytes) or run fewer requests"
    )
    assert store.free_blocks == 2
    assert store.reserve(2) == [4, 5]


@pytest.mark.parametrize(
    ("blocks", "named"),
    [([4], [4]), ([0, 5, 4], [4, 5]), ([-1], [-1]), ([CAPACITY], [6]), ([1, 1], [1, 1])],
)
def test_free_of_a_block_not_reserved_once_is_refused_and_frees_nothing(blocks, named):
    store = make_store()
    store.reserve(3)
    with pytest.raises(StateError) as caught:
        store.free(blocks)
    assert str(caught.value) == f"blocks {named} are not reserved once"
    assert store.free_blocks == 3
    assert store.reserve(3) == [3, 4, 5]


def test_double_free_is_refused():
    store = make_store()
    blocks = store.reserve(2)
    store.free(blocks)
    with pytest.raises(StateError):
        store.free(blocks[:1])
    assert store.free_blocks == CAPACITY


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_reserve_and_free_accounts_for_every_block(data):
    store, held = make_store(), set()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, store.free_blocks))
            blocks = store.reserve(count)
            assert len(set(blocks)) == count
            assert held.isdisjoint(blocks)
            held.update(blocks)
        elif held:
            given_back = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True))
            store.free(given_back)
            held.difference_update(given_back)
        assert store.free_blocks == CAPACITY - len(held)
        assert held <= set(range(CAPACITY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_read_brings_exactly_the_tiles_written(layer, dtype):
    store, tiles, dest = make_store(dtype=dtype), make_tiles(4, dtype), make_dest(dtype=dtype)
    blocks = store.reserve(5)[:0:-1]
    store.write(write_ticket(), blocks, tiles)
    sources = torch.tensor([[blocks[2], -1, blocks[0]], [blocks[3], blocks[2], -1]])
    slots = torch.tensor([[4, -1, 1], [0, 2, -1]])
    moved = store.read(read_ticket(layer), sources, dest, slots)

    expected = make_dest(dtype=dtype)
    expected[4, 0], expected[1, 0] = tiles[2, layer, 0], tiles[0, layer, 0]
    expected[0, 1], expected[2, 1] = tiles[3, layer, 1], tiles[2, layer, 1]
    assert moved == 4 * store.geometry.tile_bytes
    torch.testing.assert_close(dest, expected, rtol=0, atol=0, equal_nan=True)


def test_a_read_of_padding_moves_nothing():
    store, dest = make_store(), make_dest()
    nothing = torch.full((HEADS, 3), -1)
    assert store.read(read_ticket(), nothing, dest, nothing) == 0
    assert bool(dest.isnan().all())


def test_a_write_copies_and_touches_no_other_block():
    store, tiles = make_store(), make_tiles(2)
    first, second = store.reserve(1), store.reserve(1)
    store.write(write_ticket(), first, tiles[:1])
    store.write(write_ticket(), second, tiles[1:])
    expected = tiles.clone()
    tiles.fill_(0)
    dest, index = make_dest(), torch.tensor([[0, 1], [0, 1]])
    store.read(read_ticket(layer=2), index, dest, index)
    assert torch.equal(dest[:2], expected[:, 2])


def test_a_block_nobody_wrote_holds_nan():
    store, dest, index = make_store(), make_dest(), torch.tensor([[3], [3]])
    dest.fill_(0)
    store.read(read_ticket(), index, dest, index)
    assert bool(dest[3].isnan().all())


def test_each_completion_is_delivered_once_and_in_order():
    store, nothing = make_store(), torch.full((HEADS, 1), -1)
    store.write(write_ticket(1), store.reserve(1), make_tiles(1))
    store.read(read_ticket(2, step=1), nothing, make_dest(), nothing)
    assert store.poll() == [write_ticket(1), read_ticket(2, step=1)]
    assert store.poll() == []
    store.write(write_ticket(2), store.reserve(1), make_tiles(1))
    assert store.poll(timeout_s=1.0) == [write_ticket(2)]
    assert store.poll(timeout_s=1.0) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [1, 7])
def test_bytes_are_those_of_all_blocks(capacity, dtype):
    store = make_store(capacity, dtype)
    tile = 16 * 2 * 4 * dtype.itemsize
    assert store.nbytes == capacity * LAYERS * HEADS * tile
    store.reserve(1)
    assert store.nbytes == capacity * store.geometry.block_bytes


@pytest.mark.parametrize(("extra", "blocks"), [(-1, 2), (0, 3), (1, 3)])
def test_of_size_rounds_down_to_whole_blocks(extra, blocks):
    geometry = make_geometry()
    store = HostStore.of_size(geometry, (3 * geometry.block_bytes + extra) / 2**30)
    assert store.capacity_blocks == blocks
    assert store.nbytes <= 3 * geometry.block_bytes + extra


def test_a_store_without_a_block_is_refused():
    geometry = make_geometry()
    text = (
        "host_gib gives a store of 0 blocks: it must hold at least one block, "
        f"{geometry.block_bytes} bytes"
    )
    for make in (
        lambda: HostStore(geometry, 0),
        lambda: HostStore.of_size(geometry, (geometry.block_bytes - 1) / 2**30),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value) == text


def test_a_closed_store_has_no_memory():
    store = make_store()
    store.write(write_ticket(), store.reserve(1), make_tiles(1))
    store.close()
    assert store.nbytes == 0
    with pytest.raises(IndexError):
        store.write(write_ticket(), [0], make_tiles(1))
    store.close()
