"""The digest pool: rows by store block, the same numbers as the operations called directly."""

import pytest
import torch

from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import StateError
from oasiskv.ops.digest.reference import build_keys4, build_minmax
from oasiskv.ops.score.reference import keys4_logits, minmax_logits

LAYERS, HEADS, QUERY_HEADS, DIM, CAPACITY = 3, 2, 4, 8, 6
KINDS = ["minmax", "keys4"]
MIX, SCALE = 0.25, DIM**-0.5


def make_geometry(dtype=torch.float32):
    return KVGeometry(LAYERS, HEADS, QUERY_HEADS, DIM, dtype=dtype)


def make_pool(kind, dtype=torch.float32):
    return DigestPool(make_geometry(dtype), CAPACITY, kind, MIX, torch.device("cpu"))


def make_tiles(blocks, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, LAYERS, HEADS, *make_geometry().tile_shape)
    return torch.randn(shape, generator=generator).to(dtype)


def make_queries(count=2):
    generator = torch.Generator().manual_seed(99)
    return torch.randn((LAYERS, count, QUERY_HEADS, DIM), generator=generator)


def direct_logits(kind, tiles, queries):
    """``tiles`` ``[n, layers, ...]`` scored without a pool, one layer at a time."""
    rows = []
    for layer in range(LAYERS):
        one, query = tiles[None, :, layer], queries[layer : layer + 1]
        if kind == "minmax":
            rows.append(minmax_logits(query, build_minmax(one), MIX, SCALE))
        else:
            rows.append(keys4_logits(query, build_keys4(one), SCALE))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_operations_in_the_order_asked(kind, dtype):
    pool, tiles, queries = make_pool(kind, dtype), make_tiles(4, dtype), make_queries()
    pool.build([5, 0, 3, 2], tiles)
    logits = pool.logits(queries, torch.tensor([2, 5, 3]), SCALE)
    assert logits.shape == (LAYERS, 2, QUERY_HEADS, 3)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, direct_logits(kind, tiles[[3, 0, 2]], queries))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_call_are_those_of_several(kind):
    together, apart, tiles = make_pool(kind), make_pool(kind), make_tiles(3)
    together.build([1, 4, 0], tiles)
    for index, block in enumerate([1, 4, 0]):
        apart.build([block], tiles[index : index + 1])
    index = torch.tensor([0, 1, 4])
    assert torch.equal(
        together.logits(make_queries(), index, SCALE), apart.logits(make_queries(), index, SCALE)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_nobody_built_stay_nan(kind):
    pool = make_pool(kind)
    assert bool(pool.logits(make_queries(), torch.arange(CAPACITY), SCALE).isnan().all())
    pool.build([4, 1], make_tiles(2))
    nan = pool.logits(make_queries(), torch.arange(CAPACITY), SCALE).isnan()
    assert not bool(nan[..., [1, 4]].any())
    assert bool(nan[..., [0, 2, 3, 5]].all())


@pytest.mark.parametrize("kind", KINDS)
def test_building_a_row_leaves_the_others_as_they_were(kind):
    pool, index = make_pool(kind), torch.tensor([0, 2])
    pool.build([0, 2], make_tiles(2))
    before = pool.logits(make_queries(), index, SCALE)
    pool.build([1, 3], make_tiles(2, seed=1))
    pool.release([1])
    assert torch.equal(pool.logits(make_queries(), index, SCALE), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_used_again_forgets_its_first_block(kind):
    pool, tiles = make_pool(kind), make_tiles(1, seed=1)
    pool.build([3], make_tiles(1))
    pool.release([3])
    pool.build([3], tiles)
    logits = pool.logits(make_queries(), torch.tensor([3]), SCALE)
    torch.testing.assert_close(logits, direct_logits(kind, tiles, make_queries()))


def test_rows_used_counts_blocks():
    pool = make_pool("minmax")
    counts = [pool.rows_used]
    for block in (4, 0, 2):
        pool.build([block], make_tiles(1))
        counts.append(pool.rows_used)
    assert counts == [0, 1, 2, 3]
    pool.release([0, 4])
    assert pool.rows_used == 1
    pool.release([2])
    assert pool.rows_used == 0


@pytest.mark.parametrize("blocks", [[3], [1, 3], [7], [-1]])
def test_release_of_a_block_without_digest_is_refused_and_forgets_nothing(blocks):
    pool = make_pool("minmax")
    pool.build([0, 1], make_tiles(2))
    with pytest.raises(StateError, match=rf"store blocks \[{blocks[-1]}\] have no digest"):
        pool.release(blocks)
    assert pool.rows_used == 2


def test_release_twice_is_refused():
    pool = make_pool("minmax")
    pool.build([0], make_tiles(1))
    pool.release([0])
    with pytest.raises(StateError):
        pool.release([0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_digests(kind, dtype):
    pool = make_pool(kind, dtype)
    tokens = make_geometry().block_tokens
    # Min and max in the dtype of the keys; half a byte per key, and scale and zero in float16.
    head = 2 * DIM * dtype.itemsize if kind == "minmax" else tokens * DIM // 2 + 2 * DIM * 2
    assert pool.row_bytes == LAYERS * HEADS * head
    assert pool.nbytes == CAPACITY * pool.row_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_never_grows(kind):
    pool = make_pool(kind)
    before = pool.nbytes
    pool.build(range(CAPACITY), make_tiles(CAPACITY))
    assert pool.nbytes == before


@pytest.mark.parametrize(("kind", "sixteenths"), [("minmax", 1), ("keys4", 3)])
def test_share_of_a_bf16_block(kind, sixteenths):
    pool = make_pool(kind, torch.bfloat16)
    assert 16 * pool.row_bytes == sixteenths * make_geometry(torch.bfloat16).block_bytes
