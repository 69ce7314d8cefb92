"""What is compared with is what its papers define, by brute force."""

import pytest
import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.evals.lanes.kv import LaneKV
from oasiskv.evals.lanes.rows import Segment, lay_out
from oasiskv.evals.policies import (
    Dense,
    ExactTop,
    LayerView,
    Quest,
    RandomBlocks,
    Stale,
    WindowOnly,
    choose,
)
from oasiskv.hf.prefill import Prefilled

KV_HEADS, GROUP, DIM = 2, 3, 8
HEADS = KV_HEADS * GROUP
LAYERS = 3
LAYER = 2
TOKENS = 16 * 12
# Prompts of different lengths, neither of which fills its last block; the rest stands in tails.
PREFILLED = (16 * 7 + 5, 16 * 9 + 11)
LANES = torch.tensor([0, 0, 1, 1, 1])
ROWS = len(LANES)
COUNTS = torch.tensor([3, 3, 4, 4, 4])
FIRST = 150
"""Position of the first row; blocks 1 to 5 and more are its candidates."""


class World:
    """Random keys of two questions, each in two lanes that agree on the prefilled part only.

    Args:
        coarse: keys that 4 bits hold exactly: each channel of a block has two values.
    """

    def __init__(self, coarse=False):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        geometry = KVGeometry(LAYERS, KV_HEADS, HEADS, DIM, dtype=torch.float32)
        self.kv = draw(2, 2, LAYERS, TOKENS, KV_HEADS, 2 * DIM)
        if coarse:
            self.kv = (self.kv > 0).float() * 4 - 2
        prefilled = []
        for q, tokens in enumerate(PREFILLED):
            self.kv[q, 1, :, :tokens] = self.kv[q, 0, :, :tokens]
            tiles = self.kv[q, 0].unflatten(1, (-1, 16)).transpose(2, 3)
            prefilled.append(Prefilled(list(range(tokens)), list(tiles[:, : -(-tokens // 16)])))
        lanes = LaneKV(geometry, prefilled, 2, TOKENS - min(PREFILLED), torch.device("cpu"))
        for lane in range(2):
            # The shorter prompt's tail is longer; both are written to their end.
            segments = [
                [Segment(range(tokens, TOKENS) if own == lane else (), tokens) for own in range(2)]
                for tokens in PREFILLED
            ]
            rows = lay_out(segments, lanes.spare, torch.device("cpu"))
            at = torch.arange(2)[:, None], lane, slice(None), rows.positions
            for layer in range(LAYERS):
                lanes.write(layer, rows, self.kv[at][:, :, layer])
            lanes.close(
                [
                    (q, lane, block)
                    for q, tokens in enumerate(PREFILLED)
                    for block in range(tokens // 16, TOKENS // 16)
                ]
            )
        positions = torch.stack([torch.arange(ROWS) + FIRST, torch.arange(ROWS) * 7 + FIRST])
        end = positions // 16 - 2
        blocks = lanes.block_of[:, None]
        self.queries, self.stale = draw(2, ROWS, HEADS, DIM), draw(2, ROWS, HEADS, DIM)
        self.view = LayerView(
            LAYER, lanes, self.queries, self.stale, LANES, positions,
            (blocks >= 1) & (blocks < end[..., None]), COUNTS,
            self.token_logits(lanes), DIM**-0.5,
        )  # fmt: skip

    def token_logits(self, lanes):
        """``[Q, H, N, G, C, B]``."""
        found = torch.zeros(2, KV_HEADS, ROWS, GROUP, lanes.block_of.shape[1], 16)
        for q in range(2):
            for row, lane in enumerate(LANES):
                for c, block in enumerate(lanes.block_of[q].tolist()):
                    if block < TOKENS // 16:
                        keys = self.kv[q, lane, LAYER, block * 16 : block * 16 + 16, :, :DIM]
                        query = self.queries[q, row].unflatten(0, (KV_HEADS, GROUP))
                        dots = torch.einsum("hgd,bhd->hgb", query, keys) * DIM**-0.5
                        found[q, :, row, :, c] = dots
        return found

    def cases(self, policy):
        """Of each row and query head: keys ``[blocks, 16, D]``, candidates, and what is chosen."""
        chosen = choose([policy], [self.view]) & self.view.candidates[:, :, None]
        for q in range(2):
            for row in range(ROWS):
                keys = self.kv[q, LANES[row], LAYER, :, :, :DIM].unflatten(0, (-1, 16))
                end = int(self.view.positions[q, row]) // 16 - 2
                for head in range(HEADS):
                    own = self.view.kv.block_of[q][chosen[q, row, head]].tolist()
                    allowed = list(range(1, end))
                    yield (q, row, head), keys[:, :, head // GROUP], allowed, own


@pytest.fixture(scope="module")
def world():
    return World()


def test_quest_is_the_papers_upper_bound_of_each_query_head(world):
    """Algorithm 1: sum over channels of max(q * min, q * max); the most critical of each head."""
    for (q, row, head), keys, allowed, chosen in world.cases(Quest()):
        query = world.queries[q, row, head]
        criticality = torch.maximum(query * keys.amin(1), query * keys.amax(1)).sum(-1)
        best = sorted(allowed, key=lambda block: -float(criticality[block]))
        assert chosen == sorted(best[: COUNTS[row]])


def test_quest_leaves_its_first_two_layers_dense(world):
    for layer, dense in ((0, True), (1, True), (2, False)):
        world.view.layer = layer
        chosen = choose([Quest()], [world.view])
        assert torch.equal(chosen, choose([Dense()], [world.view])) == dense


def attention_by_block(world, queries, at, allowed):
    """Mean over the group of each head's softmax over all tokens of candidates, by block."""
    q, row, head = at
    shares = torch.zeros(len(allowed))
    kv_head = head // GROUP
    keys = world.kv[q, LANES[row], LAYER, :, kv_head, :DIM].unflatten(0, (-1, 16))[allowed]
    for own in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        logits = keys @ queries[q, row, own] * DIM**-0.5
        shares += logits.flatten().softmax(0).unflatten(0, (-1, 16)).sum(1) / GROUP
    return shares


def best_by_attention(world, queries, at, allowed):
    best = attention_by_block(world, queries, at, allowed).topk(int(COUNTS[at[1]])).indices
    return sorted(allowed[i] for i in best.tolist())


def test_exact_is_the_true_attention_of_the_same_step(world):
    for at, _, allowed, chosen in world.cases(ExactTop()):
        assert chosen == best_by_attention(world, world.queries, at, allowed)


def test_stale_is_the_attention_of_the_token_before():
    world = World(coarse=True)
    for at, _, allowed, chosen in world.cases(Stale()):
        assert chosen == best_by_attention(world, world.stale, at, allowed)


def test_the_window_is_the_newest(world):
    for (_, row, _), _, allowed, chosen in world.cases(WindowOnly()):
        assert chosen == allowed[-int(COUNTS[row]) :]


def test_random_draws_anew_for_each_row_and_alike_for_a_group(world):
    found = {}
    for (q, row, head), _, allowed, chosen in world.cases(RandomBlocks(0)):
        assert len(chosen) == COUNTS[row]
        assert set(chosen) <= set(allowed)
        assert found.setdefault((q, row, head // GROUP), chosen) == chosen
    assert len({str(chosen) for chosen in found.values()}) > len(found) // 2
    again = choose([RandomBlocks(0)], [world.view])
    assert torch.equal(again, choose([RandomBlocks(0)], [world.view]))
    assert not torch.equal(again, choose([RandomBlocks(1)], [world.view]))


def test_random_takes_all_blocks_alike(world):
    """Of 400 rows each block is taken as often as any other, within four standard errors."""
    counts = torch.zeros(2, 9)
    rows = 400
    for start in range(rows):
        world.view.positions[:, 0] = 200 + start
        counts += choose([RandomBlocks(3)], [world.view])[0, 0, ::GROUP, 1:10].float()
    world.view.positions[:, 0] = FIRST
    allowed = int(world.view.candidates[0, 0].sum())
    share = COUNTS[0] / allowed
    error = (rows * share * (1 - share)) ** 0.5
    assert bool(((counts[:, :allowed] - rows * share).abs() < 4 * error).all())
