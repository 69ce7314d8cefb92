"""Block logits and scores against plain loops."""

import math

import pytest
import torch

from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax, dequantize_keys4
from oasiskv.ops.score.reference import block_scores, key_logits, keys4_logits, minmax_logits

# (query heads, KV heads): groups of 1, 3, 4, 6, 7, 8
HEADS = [(2, 2), (9, 3), (8, 2), (12, 2), (28, 4), (8, 1)]
# rows, queries, blocks, tokens per block, head dim
SIZES = [
    (2, 3, 5, 16, 64),
    (1, 1, 1, 16, 80),
    (3, 2, 2, 7, 96),
    (1, 2, 4, 1, 128),
    (2, 1, 0, 16, 64),
]


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make(size, heads, dtype):
    rows, num_queries, blocks, tokens, dim = size
    queries = randn(rows, num_queries, heads[0], dim, dtype=dtype)
    tiles = randn(rows, blocks, heads[1], tokens, 2 * dim, seed=1, dtype=dtype) * 2
    tiles[..., dim:] = math.nan
    return queries, tiles


def logits_by_loop(queries, num_blocks, num_kv_heads, block_logit):
    """``block_logit(row, block, KV head, query as float64)`` for all of them."""
    rows, num_queries, num_heads, _ = queries.shape
    out = torch.zeros(rows, num_queries, num_heads, num_blocks, dtype=torch.float64)
    for row in range(rows):
        for i in range(num_queries):
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                for block in range(num_blocks):
                    query = queries[row, i, head].double()
                    out[row, i, head, block] = block_logit(row, block, kv_head, query)
    return out


def check(got, expected, queries):
    assert got.dtype == (torch.float64 if queries.dtype == torch.float64 else torch.float32)
    tolerance = 1e-10 if queries.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_loops(size, heads, dtype):
    queries, tiles = make(size, heads, dtype)
    dim, blocks, scale = size[4], size[2], size[4] ** -0.5
    keys = tiles[..., :dim]

    def exact(row, block, head, query):
        return (keys[row, block, head].double() @ query * scale).logsumexp(0)

    check(
        key_logits(queries, keys, scale), logits_by_loop(queries, blocks, heads[1], exact), queries
    )

    for mix in (0.5, 1.0):

        def bound(row, block, head, query, mix=mix):
            low = keys[row, block, head].double().amin(0)
            high = keys[row, block, head].double().amax(0)
            return scale * (query @ (high + low) / 2 + mix * query.abs() @ (high - low) / 2)

        got = minmax_logits(queries, build_minmax(tiles), mix, scale)
        check(got, logits_by_loop(queries, blocks, heads[1], bound), queries)

    digest = build_keys4(tiles)
    short = dequantize_keys4(digest).double()

    def quantised(row, block, head, query):
        return (short[row, block, head] @ query * scale).logsumexp(0)

    expected = logits_by_loop(queries, blocks, heads[1], quantised)
    check(keys4_logits(queries, digest, scale), expected, queries)


def test_mix_of_one_bounds_every_token():
    queries, tiles = make((2, 2, 6, 16, 64), (9, 3), torch.float32)
    bound = minmax_logits(queries, build_minmax(tiles), 1.0, 0.125)
    for token in range(16):
        keys = tiles[:, :, :, token : token + 1, :64]
        assert bool((key_logits(queries, keys, 0.125) <= bound + 1e-5).all())


def test_large_logits_stay_finite():
    queries, tiles = make((1, 1, 3, 16, 64), (2, 1), torch.float32)
    queries, tiles = queries * 1e3, tiles * 1e2
    assert bool(key_logits(queries, tiles[..., :64], 1.0).isfinite().all())
    assert bool(keys4_logits(queries, build_keys4(tiles), 1.0).isfinite().all())


def test_nan_in_one_block_stays_there():
    queries, tiles = make((2, 2, 4, 16, 64), (9, 3), torch.float32)
    keys = tiles[..., :64]
    keys[1, 2] = math.nan
    expected = torch.zeros(2, 2, 9, 4, dtype=torch.bool)
    expected[1, :, :, 2] = True
    digest = build_keys4(tiles)
    assert isinstance(digest, Keys4)
    for logits in (
        key_logits(queries, keys, 1.0),
        minmax_logits(queries, build_minmax(tiles), 0.5, 1.0),
        keys4_logits(queries, digest, 1.0),
    ):
        assert torch.equal(logits.isnan(), expected)


def test_heads_that_do_not_divide_are_refused():
    queries = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match="found 5 and 2"):
        key_logits(queries, torch.zeros(1, 1, 2, 16, 4), 1.0)
    with pytest.raises(ValueError, match="found 5 and 2"):
        block_scores(torch.zeros(1, 1, 5, 3), torch.ones(1, 3, dtype=torch.bool), 2)


def scores_by_loop(logits, candidates, num_kv_heads, query_mask):
    rows, num_queries, num_heads, num_blocks = logits.shape
    group = num_heads // num_kv_heads
    out = torch.zeros(rows, num_kv_heads, num_blocks, dtype=torch.float64)
    for row in range(rows):
        allowed = [n for n in range(num_blocks) if candidates[row, n]]
        valid = [i for i in range(num_queries) if query_mask is None or query_mask[row, i]]
        if not allowed or not valid:
            continue
        for head in range(num_heads):
            for i in valid:
                values = [float(logits[row, i, head, n]) for n in allowed]
                top = max(values)
                weights = [math.exp(value - top) for value in values]
                for n, weight in zip(allowed, weights, strict=True):
                    share = weight / sum(weights)
                    out[row, head // group, n] += share / group / len(valid)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_scores_equal_loops(heads, masked, dtype):
    rows, num_queries, blocks = 5, 3, 11
    logits = randn(rows, num_queries, heads[0], blocks, dtype=dtype) * 5
    candidates = torch.rand(rows, blocks, generator=torch.Generator().manual_seed(3)) < 0.5
    candidates[0], candidates[1] = True, False
    candidates[2] = torch.arange(blocks) == 4
    query_mask = None
    if masked:
        query_mask = torch.rand(rows, num_queries, generator=torch.Generator().manual_seed(4)) < 0.6
        query_mask[2], query_mask[3] = True, False
        logits = logits.masked_fill(~query_mask[:, :, None, None], math.nan)
    expected = scores_by_loop(logits, candidates, heads[1], query_mask)
    free = logits.masked_fill(~candidates[:, None, None, :], math.nan)
    free[0] = logits[0]
    got = block_scores(free, candidates, heads[1], query_mask)
    check(got, expected, logits)
    assert bool((got.masked_fill(candidates[:, None, :], 0) == 0).all())
    assert bool((got[1] == 0).all())
    if masked:
        assert bool((got[3] == 0).all())
        assert bool((got[2, :, 4] == 1).all())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_non_candidates_do_not_count(garbage):
    logits = randn(2, 2, 4, 6)
    candidates = torch.tensor([[True, False, True, True, False, True]] * 2)
    dirty = logits.masked_fill(~candidates[:, None, None, :], garbage)
    assert torch.equal(block_scores(dirty, candidates, 2), block_scores(logits, candidates, 2))


def test_scores_of_a_kv_head_add_up_to_one():
    scores = block_scores(randn(4, 3, 28, 300) * 4, torch.ones(4, 300, dtype=torch.bool), 4)
    torch.testing.assert_close(scores.sum(-1), torch.ones(4, 4))


@pytest.mark.parametrize(("queries", "blocks"), [(2, 0), (0, 3), (0, 0)])
def test_no_blocks_or_no_queries(queries, blocks):
    candidates = torch.ones(2, blocks, dtype=torch.bool)
    scores = block_scores(torch.zeros(2, queries, 4, blocks), candidates, 2)
    assert torch.equal(scores, torch.zeros(2, 2, blocks))
