"""Attention over compact tables against plain loops."""

import math

import pytest
import torch

from oasiskv.ops.attend.reference import attend, attend_rows

# (query heads, KV heads): groups of 1, 3, 4, 6, 7, 8
HEADS = [(2, 2), (9, 3), (8, 2), (12, 2), (28, 4), (8, 1)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make(kv_tokens, heads, tokens, dim, dtype=torch.float32, *, spare=3, seed=0):
    """NaN-filled blocks with only the table's first ``kv_tokens`` tokens written; table, blocks."""
    needed = -(-kv_tokens // tokens)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(needed + spare, generator=generator)
    blocks = torch.full((needed + spare, heads, tokens, 2 * dim), math.nan, dtype=dtype)
    text = randn(kv_tokens, heads, 2 * dim, seed=seed + 1, dtype=dtype)
    for position in range(kv_tokens):
        blocks[table[position // tokens], :, position % tokens] = text[position]
    return table, blocks


def attend_by_loop(query, blocks, table, kv_tokens, scale, sliding_window=None):
    num_tokens, num_heads, dim = query.shape
    kv_heads, tokens = blocks.shape[1:3]
    out = torch.zeros(num_tokens, num_heads, dim, dtype=torch.float64)
    for i in range(num_tokens):
        last = kv_tokens - num_tokens + i
        first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
        for head in range(num_heads):
            rows = [
                blocks[table[p // tokens], head // (num_heads // kv_heads), p % tokens].double()
                for p in range(first, last + 1)
            ]
            dots = [float(row[:dim] @ query[i, head].double()) * scale for row in rows]
            weights = [math.exp(dot - max(dots)) for dot in dots]
            for row, weight in zip(rows, weights, strict=True):
                out[i, head] += row[dim:] * (weight / sum(weights))
    return out


def check(got, expected, dtype):
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_heads_and_head_dims(dim, heads, dtype):
    table, blocks = make(19, heads[1], 8, dim, dtype)
    query = randn(2, heads[0], dim, seed=9, dtype=dtype)
    expected = attend_by_loop(query, blocks, table, 19, dim**-0.5)
    check(attend(query, blocks, table, 19, dim**-0.5), expected, dtype)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 100])
@pytest.mark.parametrize("kv_tokens", range(1, 37))
def test_every_residue_of_the_block(kv_tokens, window):
    table, blocks = make(kv_tokens, 1, 16, 8)
    for num_tokens in {1, min(3, kv_tokens), kv_tokens}:
        query = randn(num_tokens, 2, 8, seed=9)
        expected = attend_by_loop(query, blocks, table, kv_tokens, 0.4, window)
        check(attend(query, blocks, table, kv_tokens, 0.4, window), expected, torch.float32)


def test_what_no_query_sees_is_not_read():
    """Blocks before the sliding window and table entries past the end may be anything."""
    table, blocks = make(70, 2, 16, 8)
    query = randn(2, 4, 8, seed=9)
    clean = attend(query, blocks, table, 70, 0.4, 20)
    blocks[table[:3]] = math.nan  # the first query sees positions 49 to 68
    blocks[table[3], :, 0] = math.nan
    table[:3], table[5:] = -(10**6), 10**6
    assert torch.equal(attend(query, blocks, table, 70, 0.4, 20), clean)
    blocks[table[3], :, 1] = math.nan  # position 49, seen
    assert bool(attend(query, blocks, table, 70, 0.4, 20).isnan().any())


def test_order_of_older_blocks_does_not_matter():
    """Queries see all older blocks, so a permuted table is the same attention."""
    kv_tokens, num_tokens = 16 * 9 + 5, 5
    table, blocks = make(kv_tokens, 3, 16, 64)
    query = randn(num_tokens, 9, 64, seed=9)
    full = attend(query, blocks, table, kv_tokens, 0.125)
    for seed in range(3):
        shuffled = table.clone()
        shuffled[:9] = table[:9][torch.randperm(9, generator=torch.Generator().manual_seed(seed))]
        got = attend(query, blocks, shuffled, kv_tokens, 0.125)
        torch.testing.assert_close(got, full, rtol=2e-6, atol=2e-6)


def test_attention_over_the_rest_when_a_block_is_left_out():
    kv_tokens = 16 * 4 + 3
    table, blocks = make(kv_tokens, 1, 16, 8)
    query = randn(1, 2, 8, seed=9)
    compact = torch.cat([table[:1], table[2:]])
    expected = attend_by_loop(query, blocks, compact, kv_tokens - 16, 0.4)
    check(attend(query, blocks, compact, kv_tokens - 16, 0.4), expected, torch.float32)


@pytest.mark.parametrize("window", [None, 200])
def test_long_prefill_equals_explicit_softmax(window):
    kv_tokens, num_tokens = 700, 300
    table, blocks = make(kv_tokens, 3, 16, 64)
    query = randn(num_tokens, 9, 64, seed=9)
    text = blocks[table].transpose(0, 1).flatten(1, 2)[:, :kv_tokens].double()
    keys, values = (part.repeat_interleave(3, 0) for part in text.split(64, -1))
    ahead = torch.arange(kv_tokens) - torch.arange(kv_tokens - num_tokens, kv_tokens)[:, None]
    hidden = (ahead > 0) | (ahead <= -(window or kv_tokens))
    dots = query.double().transpose(0, 1) @ keys.transpose(1, 2) * 0.125
    expected = (dots.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1)
    check(attend(query, blocks, table, kv_tokens, 0.125, window), expected, torch.float32)


def test_strided_blocks_and_narrow_indices():
    table, blocks = make(40, 2, 16, 8)
    wide = torch.full((3, *blocks.shape), math.nan).movedim(0, 1)
    wide[:, 1] = blocks
    query = randn(3, 4, 16, seed=9)[..., ::2]
    got = attend(query, wide[:, 1], table.int(), 40, 0.4)
    check(got, attend_by_loop(query, blocks, table, 40, 0.4), torch.float32)


def test_refusals_name_the_values():
    table, blocks = make(32, 2, 16, 8)
    query = randn(3, 4, 8)
    with pytest.raises(ValueError, match="found 3 queries and 2 tokens"):
        attend(query, blocks, table, 2, 1.0)
    with pytest.raises(ValueError, match="found 0 queries"):
        attend(query[:0], blocks, table, 2, 1.0)
    with pytest.raises(ValueError, match="33 tokens need 3 blocks of 16; found 2"):
        attend(query, blocks, table[:2], 33, 1.0)
    with pytest.raises(ValueError, match="found 3 and 2"):
        attend(query[:, :3], blocks, table, 32, 1.0)
    with pytest.raises(
        ValueError, match="sliding_window must be at least 1 token or None; found 0"
    ):
        attend(query, blocks, table, 32, 1.0, 0)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_single_requests(dtype, window):
    query_tokens, kv_tokens = [0, 1, 5, 0, 33, 2, 0], [0, 1, 21, 50, 33, 48, 7]
    blocks = torch.full((40, 2, 16, 32), math.nan, dtype=dtype)
    tables = torch.full((7, 6), -1)
    start = 0
    for row, tokens in enumerate(kv_tokens):
        part, filled = make(tokens, 2, 16, 16, dtype, spare=0, seed=row)
        blocks[start : start + len(part)] = filled
        tables[row, : len(part)] = part + start
        start += len(part)
    query = randn(sum(query_tokens), 4, 16, seed=9, dtype=dtype)
    got = attend_rows(query, query_tokens, blocks, tables, kv_tokens, 0.3, window)
    start = 0
    for row, tokens in enumerate(query_tokens):
        part = slice(start, start + tokens)
        expected = attend_by_loop(query[part], blocks, tables[row], kv_tokens[row], 0.3, window)
        check(got[part], expected, dtype)
        start += tokens


def test_rows_refuse_numbers_that_do_not_match():
    table, blocks = make(32, 2, 16, 8)
    tables, query = torch.stack([table, table]), randn(3, 4, 8)
    with pytest.raises(ValueError, match="add up to 4, query holds 3"):
        attend_rows(query, [2, 2], blocks, tables, [32, 32], 1.0)
    with pytest.raises(ValueError, match="found 2, 1 and 2"):
        attend_rows(query, [2, 1], blocks, tables, [32], 1.0)


def test_no_rows_at_all():
    blocks = torch.zeros(1, 2, 16, 16)
    empty = attend_rows(randn(0, 4, 8), [], blocks, torch.zeros(0, 1, dtype=torch.int64), [], 1.0)
    assert empty.shape == (0, 4, 8)
