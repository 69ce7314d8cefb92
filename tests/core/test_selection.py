"""Scores against brute force, and plans in terms of the request's blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.config import OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.residency import ResidentMap
from oasiskv.core.selection import Selector, top_blocks
from oasiskv.ops.digest.reference import build_keys4, dequantize_keys4

LAYERS, HEADS, GROUP, DIM = 2, 2, 3, 8
SCALE = DIM**-0.5
GEOMETRY = KVGeometry(LAYERS, HEADS, HEADS * GROUP, DIM, dtype=torch.float64)
CPU = torch.device("cpu")


def make_config(budget=2, hot=4, sink=1, **others):
    return OasisConfig(
        budget_tokens=16 * budget, hot_tokens=16 * hot, sink_tokens=16 * sink, **others
    )


def make_selector(config, blocks=1):
    pool = DigestPool(GEOMETRY, blocks, config.digest, config.minmax_mix, CPU)
    return Selector(config, GEOMETRY, pool, SCALE), pool


def make_scores(*values):
    """The same scores for all layers and heads."""
    return torch.tensor(values).expand(LAYERS, HEADS, len(values))


def make_residents(*blocks, slots, dates):
    """The same blocks for all layers and heads, in the first slots of a map."""
    residents = ResidentMap(GEOMETRY, slots, CPU)
    held = torch.tensor(blocks).expand(LAYERS, HEADS, len(blocks))
    residents.fill(held, torch.ones_like(held, dtype=torch.bool), step=0)
    residents.last_wanted[..., : len(dates)] = torch.tensor(dates)
    return residents


def commit(residents, selection):
    for layer, plan in enumerate(selection.layers):
        residents.commit(layer, plan.sources, plan.victims, plan.last_wanted)


def logit(config, query, tile):
    """One block for one query, written out."""
    keys = tile[:, :DIM]
    if config.digest == "keys4":
        keys = dequantize_keys4(build_keys4(tile)).double()
        return math.log(sum(math.exp(SCALE * float(query @ key)) for key in keys))
    low, high = keys.amin(0), keys.amax(0)
    spread = config.minmax_mix * query.abs() @ (high - low) / 2
    return SCALE * float(query @ (high + low) / 2 + spread)


@pytest.mark.parametrize("digest", ["minmax", "keys4"])
def test_score_is_the_mean_share_over_the_candidates_only(digest):
    config = make_config(digest=digest, minmax_mix=0.25)
    selector, pool = make_selector(config, blocks=6)
    generator = torch.Generator().manual_seed(3)
    shape = (6, LAYERS, HEADS, *GEOMETRY.tile_shape)
    tiles = torch.randn(shape, generator=generator, dtype=torch.float64)
    queries = torch.randn((LAYERS, 2, HEADS * GROUP, DIM), generator=generator, dtype=torch.float64)
    pool.build(range(6), tiles)
    candidates = [4, 0, 5, 2]

    expected = torch.zeros((LAYERS, HEADS, len(candidates)), dtype=torch.float64)
    for layer in range(LAYERS):
        for head in range(HEADS):
            rows = queries[layer, :, head * GROUP : (head + 1) * GROUP].flatten(0, 1)
            for query in rows:
                mass = [
                    math.exp(logit(config, query, tiles[block, layer, head]))
                    for block in candidates
                ]
                expected[layer, head] += torch.tensor(mass).double() / sum(mass) / len(rows)

    scores = selector.score(queries, torch.tensor(candidates))
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-9)


def test_plan_speaks_of_blocks_of_the_request():
    """Candidate i is block i + 2 where the sink has two blocks."""
    selector, _ = make_selector(make_config(budget=3, hot=4, sink=2, cap_fraction=None))
    residents = make_residents(2, 4, 6, slots=4, dates=[5, 3, 4])
    # Candidates are blocks 2..7; wanted are 7, 3 and (doubled, as it is in a slot) 4.
    scores = make_scores(0.0, 0.3, 0.2, 0.05, 0.05, 0.4)
    selection = selector.plan(scores, residents, step=9)
    assert selection.wanted[0, 0].tolist() == [4, 7, 3]
    assert selection.misses[0, 0].item() == 2
    plan = selection.layers[1]
    assert plan.sources[1].tolist() == [7, 3, -1]
    assert plan.victims[1].tolist() == [2, 0, -1]
    assert plan.last_wanted[1].tolist() == [9, 9, 9, -1]


def test_plan_leaves_the_resident_map_alone():
    selector, _ = make_selector(make_config())
    residents = make_residents(1, 2, slots=4, dates=[0, 0])
    before = residents.blocks.clone(), residents.last_wanted.clone()
    selection = selector.plan(make_scores(0.1, 0.2, 0.3, 0.4), residents, step=1)
    selection.layers[0].last_wanted.fill_(77)
    assert torch.equal(residents.blocks, before[0])
    assert torch.equal(residents.last_wanted, before[1])


def test_padding_of_a_small_plan_stays_padding():
    """With fewer candidates than the budget the rest is -1, not a sink block."""
    selector, _ = make_selector(make_config(budget=4, sink=3, cap_fraction=None))
    residents = make_residents(3, slots=4, dates=[0])
    selection = selector.plan(make_scores(0.6, 0.4), residents, step=1)
    assert selection.wanted[0, 0].tolist() == [3, 4, -1, -1]
    assert bool((selection.layers[0].sources == -1).all())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_keeps_to_the_candidates_the_cap_and_the_filled_slots(data):
    sink, candidates = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 9))
    hot = data.draw(st.integers(1, 6))
    budget = data.draw(st.integers(1, hot))
    cap = data.draw(st.sampled_from([None, 0.3, 0.7, 1.0]))
    config = make_config(budget, hot, sink, cap_fraction=cap)
    selector, _ = make_selector(config)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    filled = min(hot, candidates)
    residents = ResidentMap(GEOMETRY, hot, CPU)
    order = torch.rand((LAYERS, HEADS, candidates), generator=generator).argsort(dim=-1)
    held = order[..., :filled] + sink
    residents.fill(held, torch.rand(held.shape, generator=generator) < 0.5, step=0)

    for step in (1, 2):
        scores = torch.rand((LAYERS, HEADS, candidates), generator=generator)
        selection = selector.plan(scores, residents, step)
        real = selection.wanted[selection.wanted >= 0]
        assert bool(((real >= sink) & (real < sink + candidates)).all())
        assert bool(((selection.wanted >= 0).sum(-1) == min(budget, candidates)).all())
        for layer, plan in enumerate(selection.layers):
            assert torch.equal(plan.sources >= 0, plan.victims >= 0)
            assert int((plan.victims >= 0).sum(-1).max()) <= config.cap_blocks
            assert int(plan.victims.max()) < filled
            assert bool((plan.last_wanted[:, filled:] == -1).all())
            for head in range(HEADS):
                sources = set(plan.sources[head].tolist()) - {-1}
                assert sources <= set(selection.wanted[layer, head].tolist())
                assert sources.isdisjoint(residents.blocks[layer, head].tolist())
        commit(residents, selection)
        residents.check(sink, sink + candidates)


def test_cap_limits_what_is_fetched_and_not_what_is_missed():
    selector, _ = make_selector(make_config(budget=4, hot=4, cap_fraction=0.5))
    residents = make_residents(1, 2, 3, 4, slots=4, dates=[0, 0, 0, 0])
    scores = make_scores(0.01, 0.01, 0.01, 0.01, 0.2, 0.3, 0.25, 0.21)
    selection = selector.plan(scores, residents, step=1)
    assert bool((selection.misses == 4).all())
    assert [plan.num_tiles for plan in selection.layers] == [2 * HEADS] * LAYERS
    assert selection.layers[0].sources[0].tolist() == [6, 7]


def test_hysteresis_keeps_a_block_that_is_nearly_as_good():
    residents = make_residents(1, slots=2, dates=[0])
    scores = make_scores(0.3, 0.5)
    stays, _ = make_selector(make_config(budget=1, hot=2, hysteresis=2.0))
    goes, _ = make_selector(make_config(budget=1, hot=2, hysteresis=1.0))
    assert stays.plan(scores, residents, step=1).wanted[0, 0].tolist() == [1]
    assert goes.plan(scores, residents, step=1).wanted[0, 0].tolist() == [2]


def test_first_fill_puts_the_least_wanted_first():
    selector, _ = make_selector(make_config(budget=2, hot=3, sink=2))
    blocks, wanted = selector.first_fill(make_scores(0.1, 0.4, 0.2, 0.3), slots=3)
    assert blocks[1, 1].tolist() == [4, 5, 3]
    assert wanted[1, 1].tolist() == [False, True, True]


def test_first_fill_of_each_head_is_its_own():
    selector, _ = make_selector(make_config(budget=1, hot=2))
    scores = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], [[0.2, 0.7, 0.1], [0.2, 0.1, 0.7]]])
    blocks, _ = selector.first_fill(scores, slots=2)
    assert blocks.tolist() == [[[2, 1], [2, 3]], [[1, 2], [1, 3]]]


def test_first_fill_with_more_slots_than_candidates_takes_them_all():
    selector, _ = make_selector(make_config(budget=3, hot=4, sink=1))
    blocks, wanted = selector.first_fill(make_scores(0.6, 0.4), slots=4)
    assert blocks[0, 0].tolist() == [2, 1]
    assert wanted[0, 0].tolist() == [True, True]


def test_after_the_first_fill_the_worst_block_is_evicted_first():
    selector, _ = make_selector(make_config(budget=1, hot=4, sink=0))
    residents = ResidentMap(GEOMETRY, 4, CPU)
    residents.fill(*selector.first_fill(make_scores(0.1, 0.2, 0.3, 0.4), slots=4), step=0)
    evicted = []
    # One block after the other that is better than all there are.
    for step, length in enumerate(range(5, 8), start=1):
        scores = [0.1, 0.2, 0.3, 0.4] + [0.0] * (length - 5) + [9.0]
        selection = selector.plan(make_scores(*scores), residents, step)
        slot = selection.layers[0].victims[0, 0]
        evicted.append(int(residents.blocks[0, 0, slot]))
        commit(residents, selection)
    assert evicted == [0, 1, 2]


def test_top_blocks_gives_ties_to_the_lower_block():
    scores = torch.tensor([[[0.2, 0.5, 0.2, 0.2, 0.5]]])
    assert top_blocks(scores, 3).tolist() == [[[True, True, False, False, True]]]
    assert top_blocks(scores, 1).tolist() == [[[False, True, False, False, False]]]


@pytest.mark.parametrize("budget", [0, 2, 3, 9])
def test_top_blocks_marks_the_budget_or_all_there_are(budget):
    scores = torch.rand((LAYERS, HEADS, 3), generator=torch.Generator().manual_seed(0))
    mask = top_blocks(scores, budget)
    assert mask.dtype == torch.bool
    assert mask.shape == scores.shape
    assert bool((mask.sum(-1) == min(budget, 3)).all())
