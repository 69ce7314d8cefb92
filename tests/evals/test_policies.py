"""What is compared with is what its papers define, by brute force."""

import pytest
import torch

from oasiskv.evals.policies import (
    Dense,
    ExactTop,
    LayerView,
    Quest,
    RandomBlocks,
    Replay,
    Stale,
    WindowOnly,
)

ROWS, BLOCKS, KV_HEADS, GROUP, DIM = 5, 12, 2, 3, 8
HEADS = KV_HEADS * GROUP
COUNT = 3


@pytest.fixture
def view():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    candidates = torch.zeros(ROWS, BLOCKS, dtype=torch.bool)
    for row in range(ROWS):
        candidates[row, 1 : 6 + row] = True
    return LayerView(
        2, draw(ROWS, HEADS, DIM), draw(ROWS, HEADS, DIM), draw(BLOCKS, KV_HEADS, 16, 2 * DIM),
        candidates, DIM**-0.5, 100,
    )  # fmt: skip


def test_quest_is_the_papers_upper_bound_of_each_query_head(view):
    """Algorithm 1: sum over channels of max(q * min, q * max); the most critical of each head."""
    chosen = Quest(COUNT).choose(view)
    for row in range(ROWS):
        allowed = view.candidates[row].nonzero().flatten().tolist()
        for head in range(HEADS):
            keys = view.keys[:, head // GROUP]
            low, high = keys.amin(1), keys.amax(1)
            query = view.queries[row, head]
            criticality = torch.maximum(query * low, query * high).sum(-1)
            best = sorted(allowed, key=lambda block: -float(criticality[block]))[:COUNT]
            assert chosen[row, head].nonzero().flatten().tolist() == sorted(best)


def test_quest_leaves_its_first_two_layers_dense(view):
    for layer, dense in ((0, True), (1, True), (2, False)):
        view.layer = layer
        chosen = Quest(COUNT).choose(view)
        assert torch.equal(chosen, Dense(COUNT).choose(view)) == dense


def attention_over_candidates(query, view, row, kv_head):
    """Mean over the group of each head's softmax over all tokens of candidates, by block."""
    shares = torch.zeros(BLOCKS)
    allowed = view.candidates[row]
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        logits = view.keys[:, kv_head] @ query[row, head] * view.scale
        logits[~allowed] = -torch.inf
        shares += logits.flatten().softmax(0).reshape(BLOCKS, 16).sum(1) / GROUP
    return shares


def test_exact_is_the_true_attention_of_the_same_step(view):
    chosen = ExactTop(COUNT).choose(view)
    for row in range(ROWS):
        for head in range(HEADS):
            shares = attention_over_candidates(view.queries, view, row, head // GROUP)
            assert set(chosen[row, head].nonzero().flatten().tolist()) == set(
                shares.topk(COUNT).indices.tolist()
            )


def test_stale_is_the_attention_of_the_token_before(view):
    """With keys that 4 bits hold exactly: each channel of a block has two values."""
    view.tiles = (view.tiles > 0).float() * 4 - 2
    chosen = Stale(COUNT).choose(view)
    for row in range(ROWS):
        for head in range(HEADS):
            shares = attention_over_candidates(view.stale, view, row, head // GROUP)
            assert set(chosen[row, head].nonzero().flatten().tolist()) == set(
                shares.topk(COUNT).indices.tolist()
            )


def test_the_window_is_the_newest(view):
    chosen = WindowOnly(COUNT).choose(view)
    for row in range(ROWS):
        end = 6 + row
        assert chosen[row, 0].nonzero().flatten().tolist() == list(range(end - COUNT, end))


def test_random_draws_anew_for_each_row_and_alike_for_a_group(view):
    chosen = RandomBlocks(COUNT, 0).choose(view)
    assert bool((chosen.sum(-1) == COUNT).all())
    assert not bool((chosen & ~view.candidates[:, None]).any())
    assert torch.equal(chosen[:, 0], chosen[:, 1])
    assert not torch.equal(chosen[:, 0], chosen[:, GROUP])
    assert not torch.equal(chosen, RandomBlocks(COUNT, 1).choose(view))
    assert torch.equal(chosen, RandomBlocks(COUNT, 0).choose(view))


def test_replay_takes_what_was_held(view):
    held = torch.full((3, KV_HEADS, 4), -1)
    held[2, 0, :2] = torch.tensor([4, 2])
    held[2, 1, 0] = 3
    chosen = Replay(0, {100 + row: held for row in range(ROWS)}).choose(view)
    for row in range(ROWS):
        assert chosen[row, 0].nonzero().flatten().tolist() == [2, 4]
        assert chosen[row, GROUP].nonzero().flatten().tolist() == [3]
