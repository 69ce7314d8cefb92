"""Checksums of tiles: any damage is seen, nothing else is, and a damaged tile goes nowhere."""

import pytest
import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.stores.base import Ticket
from oasiskv.stores.checksums import tile_checksums
from oasiskv.stores.host import HostStore

LAYERS, HEADS, BLOCKS = 2, 2, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_tiles(dtype=torch.float32, blocks=BLOCKS):
    generator = torch.Generator().manual_seed(1)
    shape = (blocks, LAYERS, HEADS, 16, 2 * 4)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    tile = make_tiles(dtype)[0, 0, 0]
    expected = tile_checksums(tile)
    data = tile.view(-1).view(torch.uint8)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert tile_checksums(tile) != expected
            data[place] ^= 1 << bit
    assert tile_checksums(tile) == expected


@pytest.mark.parametrize("bit", [31, 30, 0])
def test_two_flips_of_the_same_bit_do_not_cancel(bit):
    tile = make_tiles()[0, 0, 0]
    words = tile.view(-1).view(torch.int32)
    flip = torch.tensor([1 << bit]).to(torch.int32)
    expected = tile_checksums(tile)
    for first in range(len(words)):
        for second in range(first):
            words[[first, second]] ^= flip
            assert tile_checksums(tile) != expected
            words[[first, second]] ^= flip


def test_order_zeros_and_another_tile_are_seen():
    tiles = make_tiles().flatten(0, 2)
    others = [tiles.flip(1), tiles.flip(2), torch.zeros_like(tiles), tiles.roll(1, 0), -tiles]
    for other in others:
        assert bool((tile_checksums(tiles) != tile_checksums(other)).all())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (65,), (3, 50)])
def test_any_number_of_tiles(shape):
    tiles = torch.randn((*shape, 16, 8), generator=torch.Generator().manual_seed(2))
    sums = tile_checksums(tiles)
    assert sums.shape == shape
    each = [tile_checksums(tile) for tile in tiles.reshape(-1, 16, 8)]
    assert sums.reshape(-1).tolist() == [int(one) for one in each]


def test_views_and_signed_zeros_and_nan_have_the_sums_of_their_bits():
    tiles = make_tiles().flatten(0, 2)
    assert torch.equal(tile_checksums(tiles.mT.contiguous().mT), tile_checksums(tiles))
    zeros = torch.zeros((2, 16, 8))
    zeros[1, 3, 3] = -0.0
    assert tile_checksums(zeros)[0] != tile_checksums(zeros)[1]
    nan = torch.full((2, 16, 8), torch.nan)
    assert tile_checksums(nan)[0] == tile_checksums(nan)[1]


class TestStore:
    @pytest.fixture(params=DTYPES)
    def store(self, request):
        geometry = KVGeometry(LAYERS, HEADS, HEADS, 4, dtype=request.param)
        store = HostStore(geometry, BLOCKS + 1, checksums=True)
        self.tiles = make_tiles(request.param)
        self.write(store, range(BLOCKS), self.tiles)
        return store

    def write(self, store, blocks, tiles):
        store.write(Ticket("write", "a", 0, 0), list(blocks), tiles)

    def read(self, store, layer, index):
        """What comes of blocks ``[heads, n]``, bytes moved, and which tiles were damaged."""
        dest = torch.full((BLOCKS, HEADS, 16, 8), -1.0).to(self.tiles.dtype)
        ticket = Ticket("read", "a", 0, 1, layer)
        moved = store.read(ticket, index, dest, index)
        assert ticket in store.poll()
        damaged = store.damaged(ticket)
        assert store.damaged(ticket) is None
        return dest, moved, damaged

    def damage(self, store, block, layer, head):
        store.layer(layer)[block, head].view(torch.uint8)[7, 3] ^= 16

    def test_nothing_is_seen_where_nothing_is_damaged(self, store):
        index = torch.tensor([[0, 2, 1], [1, -1, -1]])
        for layer in range(LAYERS):
            dest, moved, damaged = self.read(store, layer, index)
            assert damaged is None
            assert moved == 4 * store.geometry.tile_bytes
            assert torch.equal(dest[:, 0], self.tiles[:, layer, 0])
        assert store.damaged_blocks(range(BLOCKS)) == set()
        assert store.checksums.damaged_tiles == 0

    def test_a_damaged_tile_stays_where_it_is_and_the_others_go(self, store):
        self.damage(store, 1, 0, 1)
        index = torch.tensor([[0, 1, 2], [2, 1, -1]])
        dest, moved, damaged = self.read(store, 0, index)
        assert damaged.tolist() == [[False, False, False], [False, True, False]]
        assert moved == 4 * store.geometry.tile_bytes
        assert torch.equal(dest[:, 0], self.tiles[:, 0, 0])
        assert torch.equal(dest[2, 1], self.tiles[2, 0, 1])
        assert bool((dest[:2, 1] == -1).all())
        assert self.read(store, 1, index)[2] is None
        assert store.checksums.damaged_tiles == 1
        assert store.checksums.damaged_blocks == {1}

    def test_what_is_written_again_is_whole(self, store):
        self.damage(store, 1, 1, 0)
        assert store.damaged_blocks([0, 2]) == set()
        assert store.damaged_blocks([0, 1, 2]) == {1}
        self.write(store, [1], self.tiles[2:])
        assert store.checksums.damaged_blocks == set()
        assert store.damaged_blocks([0, 1, 2]) == set()


def test_without_checksums_nobody_looks():
    store = HostStore(KVGeometry(LAYERS, HEADS, HEADS, 4, dtype=torch.float32), BLOCKS)
    assert store.checksums is None
    assert store.damaged_blocks([0]) == set()
