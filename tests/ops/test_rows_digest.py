"""Digests written into the pool: reference and kernel against the op on gathered tiles."""

import math

import pytest
import torch

from backends import BACKENDS, DEVICE, far_view, load_op, same_bits
from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# blocks in the cache, KV heads, tokens per block, head dim
SIZES = [(7, 3, 16, 64), (3, 1, 16, 80), (5, 2, 7, 96), (4, 2, 16, 128), (2, 1, 1, 6)]


def make_cache(size, dtype):
    blocks, heads, tokens, dim = size
    generator = torch.Generator().manual_seed(dim)
    cache = torch.randn(blocks, heads, tokens, 2 * dim, generator=generator) * 3
    cache[..., dim:] = math.nan  # values must not be looked at
    cache[1, 0, :, 1] = 1.5
    cache[0, :, 0, 2] = math.nan
    return cache.to(dtype)


def make_index(blocks):
    """Every block but the last, some twice, some missing; rows of a pool of 11."""
    source = torch.tensor([1, -1, 0, *range(blocks - 1), -1])
    dest = torch.randperm(11, generator=torch.Generator().manual_seed(blocks))[: len(source)]
    return source, dest.masked_fill(source < 0, -1)


def free_minmax(heads, dim, dtype):
    return torch.full((11, 2, heads, 2, dim), math.nan, dtype=dtype)


def free_keys4(heads, tokens, dim):
    codes = torch.full((11, 3, heads, tokens, dim // 2), 255, dtype=torch.uint8)
    return Keys4(codes, torch.full((11, 3, heads, 2, dim), math.nan, dtype=torch.float16))


def layouts(cache):
    """The cache, and, in bf16, the same numbers with the heads innermost of the blocks."""
    yield cache.to(DEVICE)
    if cache.dtype == torch.bfloat16:
        yield cache.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_minmax_in_one_layer_of_the_pool(size, dtype, backend):
    cache = make_cache(size, dtype)
    source, dest = make_index(size[0])
    pool = free_minmax(size[1], size[3], dtype)
    expected = pool.clone()
    for block, row in zip(source.tolist(), dest.tolist(), strict=True):
        if block >= 0:
            expected[row, 1] = build_minmax(cache[block])
    for tiles in layouts(cache):
        got = pool.to(DEVICE)
        write = load_op("digest", "write_minmax", backend)
        write(tiles, source.to(DEVICE), got[:, 1], dest.to(DEVICE))
        assert same_bits(got.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_keys4_in_one_layer_of_the_pool(size, dtype, backend):
    cache = make_cache(size, dtype)
    cache[2 % size[0], 0, 0, :2] = torch.tensor([1e30, -1e30]).to(dtype)
    source, dest = make_index(size[0])
    pool = free_keys4(size[1], size[2], size[3])
    expected = Keys4(*(part.clone() for part in pool))
    for block, row in zip(source.tolist(), dest.tolist(), strict=True):
        if block >= 0:
            built = build_keys4(cache[block])
            expected.codes[row, 2], expected.scale_zero[row, 2] = built
    write = load_op("digest", "write_keys4", backend)
    for tiles in layouts(cache):
        got = Keys4(*(part.to(DEVICE) for part in pool))
        layer = Keys4(got.codes[:, 2], got.scale_zero[:, 2])
        write(tiles, source.to(DEVICE), layer, dest.to(DEVICE))
        assert torch.equal(got.codes.cpu(), expected.codes)
        assert same_bits(got.scale_zero.cpu(), expected.scale_zero)


def test_codes_of_many_keys_are_exact(backend):
    """Rounding is that of IEEE division, also where a quotient lies near a half."""
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(24, 4, 16, 256, generator=generator)
    cache *= torch.rand(24, 4, 1, 256, generator=generator) * 8
    cache[::2] = (cache[::2] * 4).round() / 4
    expected = build_keys4(cache)
    got = Keys4(
        torch.empty_like(expected.codes, device=DEVICE),
        torch.empty_like(expected.scale_zero, device=DEVICE),
    )
    index = torch.arange(24, device=DEVICE)
    load_op("digest", "write_keys4", backend)(cache.to(DEVICE), index, got, index)
    assert torch.equal(got.codes.cpu(), expected.codes)
    assert torch.equal(got.scale_zero.cpu(), expected.scale_zero)


def test_v50427_offsets_past_two_to_the_31_elements(backend, monkeypatch):
    stride = 2**30 + 64
    cache = far_view((3, 2, 16, 32), stride, torch.float16, monkeypatch)
    pool = far_view((3, 2, 2, 16), stride, torch.float16, monkeypatch)
    tiles = make_cache((3, 2, 16, 16), torch.float16)[2]
    cache[2] = tiles.to(DEVICE)
    index = torch.tensor([2], device=DEVICE)
    load_op("digest", "write_minmax", backend)(cache, index, pool, index)
    assert same_bits(pool[2].cpu(), build_minmax(tiles))


def test_no_blocks(backend):
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    pool = free_minmax(1, 64, torch.float32).to(DEVICE)
    cache = torch.zeros(2, 1, 16, 128, device=DEVICE)
    load_op("digest", "write_minmax", backend)(cache, none, pool[:, 0], none)
    assert bool(pool.isnan().all())
