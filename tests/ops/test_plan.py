"""The swap plan against its definition in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.ops.plan.reference import Plan, make_plan

# Few values, exact in float32 with the factors below: many ties, also after hysteresis.
SCORES = [0.0, 0.125, 0.25, 0.5, 1.0]


def plan_by_loop(scores, candidates, resident, last_wanted, budget, cap, hysteresis, step):
    """The definition, for one row and KV head, on lists; (wanted, pairs, misses, last_wanted)."""

    def adjusted(block):
        return scores[block] * (hysteresis if block in resident else 1)

    allowed = [block for block in range(len(scores)) if candidates[block]]
    wanted = sorted(allowed, key=lambda block: (-adjusted(block), block))[:budget]
    missing = [block for block in wanted if block not in resident]

    def order(slot):
        if resident[slot] == -1:
            return (-2, slot)
        return (last_wanted[slot] if candidates[resident[slot]] else -1, slot)

    victims = sorted((s for s, block in enumerate(resident) if block not in wanted), key=order)
    pairs = list(zip(missing, victims, strict=False))
    pairs = pairs if cap is None else pairs[:cap]
    updated = [
        step if resident[slot] in wanted else last_wanted[slot] for slot in range(len(resident))
    ]
    for _, slot in pairs:
        updated[slot] = step
    return wanted, pairs, len(missing), updated


def padded(values, width):
    return list(values) + [-1] * (width - len(values))


@st.composite
def cases(draw):
    """Batches of rows with different candidates, and a resident map that fits them."""
    rows, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    blocks, slots = draw(st.integers(0, 9)), draw(st.integers(0, 7))
    step = draw(st.integers(0, 6))

    def several(element, *shape):
        if not shape:
            return draw(element)
        return [several(element, *shape[1:]) for _ in range(shape[0])]

    def resident_map():
        filled = draw(st.permutations(range(blocks)))[: draw(st.integers(0, min(blocks, slots)))]
        return draw(st.permutations(padded(filled, slots)))

    return {
        "scores": torch.tensor(several(st.sampled_from(SCORES), rows, heads, blocks)).reshape(
            rows, heads, blocks
        ),
        "candidates": torch.tensor(several(st.booleans(), rows, blocks), dtype=torch.bool).reshape(
            rows, blocks
        ),
        "resident": torch.tensor(
            [[resident_map() for _ in range(heads)] for _ in range(rows)], dtype=torch.int64
        ).reshape(rows, heads, slots),
        "last_wanted": torch.tensor(
            several(st.integers(-1, step), rows, heads, slots), dtype=torch.int64
        ).reshape(rows, heads, slots),
        "budget": draw(st.integers(0, 8)),
        "cap": draw(st.none() | st.integers(0, 9)),
        "hysteresis": draw(st.sampled_from([0.5, 1.0, 2.0])),
        "step": step,
    }


@settings(max_examples=600, deadline=None)
@given(cases())
def test_plan_is_its_definition(case):
    before = {k: v.clone() for k, v in case.items() if isinstance(v, torch.Tensor)}
    plan = make_plan(**case)
    for name, value in before.items():
        assert torch.equal(case[name], value), f"{name} was modified"
    rows, heads, _ = case["scores"].shape
    budget, cap, slots = case["budget"], case["cap"], case["resident"].shape[2]
    width = min(budget, slots) if cap is None else cap
    assert plan.wanted.shape == (rows, heads, budget)
    assert plan.sources.shape == plan.victims.shape == (rows, heads, width)
    assert {part.dtype for part in plan} == {torch.int64}
    for row in range(rows):
        for head in range(heads):
            wanted, pairs, misses, last_wanted = plan_by_loop(
                case["scores"][row, head].tolist(),
                case["candidates"][row].tolist(),
                case["resident"][row, head].tolist(),
                case["last_wanted"][row, head].tolist(),
                budget,
                cap,
                case["hysteresis"],
                case["step"],
            )
            assert plan.wanted[row, head].tolist() == padded(wanted, budget)
            assert plan.sources[row, head].tolist() == padded([p[0] for p in pairs], width)
            assert plan.victims[row, head].tolist() == padded([p[1] for p in pairs], width)
            assert int(plan.misses[row, head]) == misses
            assert plan.last_wanted[row, head].tolist() == last_wanted


@settings(max_examples=200, deadline=None)
@given(cases())
def test_plan_keeps_the_resident_map_sound(case):
    """Without the definition: what must hold of any plan, and again after it is carried out."""
    plan = make_plan(**case)
    again = make_plan(**case)
    assert all(torch.equal(a, b) for a, b in zip(plan, again, strict=True))
    for row in range(case["scores"].shape[0]):
        for head in range(case["scores"].shape[1]):
            resident = case["resident"][row, head].tolist()
            wanted = [block for block in plan.wanted[row, head].tolist() if block >= 0]
            sources = [block for block in plan.sources[row, head].tolist() if block >= 0]
            victims = [slot for slot in plan.victims[row, head].tolist() if slot >= 0]
            assert all(case["candidates"][row, block] for block in wanted)
            assert len(set(wanted)) == len(wanted) <= case["budget"]
            assert set(sources) <= set(wanted) - set(resident)
            assert len(set(sources)) == len(sources) == len(victims) == len(set(victims))
            assert case["cap"] is None or len(sources) <= case["cap"]
            assert not {resident[slot] for slot in victims} & set(wanted)
            for block, slot in zip(sources, victims, strict=True):
                resident[slot] = block
            filled = [block for block in resident if block >= 0]
            assert len(set(filled)) == len(filled)
            if case["cap"] is None and len(wanted) <= len(resident):
                assert set(wanted) <= set(resident)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_rows_do_not_touch_each_other(case):
    plan = make_plan(**case)
    for row in range(case["scores"].shape[0]):
        part = slice(row, row + 1)
        alone = make_plan(
            **{k: v[part] if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        )
        assert all(torch.equal(a[part], b) for a, b in zip(plan, alone, strict=True))


def plan_one(scores, resident, *, candidates=None, last_wanted=None, **settings_):
    blocks = torch.tensor([[scores]], dtype=settings_.pop("dtype", torch.float32))
    allowed = torch.tensor([candidates or [True] * len(scores)])
    since = torch.tensor([[last_wanted or [0] * len(resident)]])
    options = {"budget": 2, "cap": None, "hysteresis": 2.0, "step": 9} | settings_
    return make_plan(blocks, allowed, torch.tensor([[resident]]), since, **options)


def test_a_plan_by_hand():
    plan = plan_one(
        [0.1, 0.4, 0.3, 0.2, 0.0], [3, -1, 0, 4], last_wanted=[5, 7, 8, 2], budget=3, cap=2
    )
    # 3 is resident, so 0.2 counts as 0.4: a tie with 1, which has the lower index.
    assert plan.wanted.tolist() == [[[1, 3, 2]]]
    assert plan.sources.tolist() == [[[1, 2]]]
    assert plan.victims.tolist() == [[[1, 3]]]  # the empty slot, then the one wanted longest ago
    assert plan.misses.tolist() == [[2]]
    assert plan.last_wanted.tolist() == [[[9, 9, 8, 9]]]


def test_block_that_is_no_candidate_leaves_first():
    plan = plan_one([0.9, 0.5, 0.4], [2, 0], candidates=[False, True, True], last_wanted=[8, 8])
    assert plan.wanted.tolist() == [[[2, 1]]]
    assert plan.sources.tolist() == [[[1, -1]]]
    assert plan.victims.tolist() == [[[1, -1]]]


def test_candidates_with_score_zero_count():
    plan = plan_one([0.0, 0.0, 0.0], [-1, -1], candidates=[False, True, True])
    assert plan.wanted.tolist() == [[[1, 2]]]


def test_nan_at_a_candidate_is_refused_and_elsewhere_ignored():
    scores = [0.5, math.nan, 0.25]
    plan = plan_one(scores, [-1, -1], candidates=[True, False, True])
    assert plan.wanted.tolist() == [[[0, 2]]]
    with pytest.raises(ValueError, match="1 of 3 scores of candidate blocks are NaN"):
        plan_one(scores, [-1, -1])


@pytest.mark.parametrize("limits", [{"budget": -1}, {"cap": -2}])
def test_negative_limits_are_refused(limits):
    with pytest.raises(ValueError, match="must not be negative"):
        plan_one([0.5], [-1], **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_score_dtypes(dtype):
    plan = plan_one([0.25, 0.5, 0.375], [2, -1], dtype=dtype)
    assert plan.wanted.tolist() == [[[2, 1]]]


def test_large_batch_with_mixed_lengths():
    generator = torch.Generator().manual_seed(0)
    rows, heads, blocks, slots, budget = 6, 2, 400, 90, 60
    lengths = [0, 1, 59, 60, 233, 400]
    candidates = torch.arange(blocks) < torch.tensor(lengths)[:, None]
    scores = torch.rand(rows, heads, blocks, generator=generator).masked_fill(
        ~candidates[:, None, :], math.nan
    )
    resident = torch.full((rows, heads, slots), -1)
    last_wanted = torch.full((rows, heads, slots), -1)
    for step in range(3):
        plan = make_plan(
            scores, candidates, resident, last_wanted,
            budget=budget, cap=25, hysteresis=2.0, step=step,
        )  # fmt: skip
        assert isinstance(plan, Plan)
        for row in range(rows):
            for head in range(heads):
                expected = plan_by_loop(
                    scores[row, head].tolist(), candidates[row].tolist(),
                    resident[row, head].tolist(), last_wanted[row, head].tolist(),
                    budget, 25, 2.0, step,
                )  # fmt: skip
                assert plan.wanted[row, head].tolist() == padded(expected[0], budget)
                assert plan.victims[row, head].tolist() == padded([p[1] for p in expected[1]], 25)
                for block, slot in expected[1]:
                    resident[row, head, slot] = block
        last_wanted = plan.last_wanted
        scores = (scores * 7.3).fmod(1.0)
