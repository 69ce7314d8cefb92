"""Plans for several requests: reference and kernel against the definition in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import BACKENDS, DEVICE, load_op

both = pytest.mark.parametrize("backend", BACKENDS)
STEP = 7


def plan_by_loop(scores, first, end, resident, last_wanted, budget, cap, hysteresis):
    """One row and KV head, on lists; ``(wanted, pairs, misses, last_wanted)``."""

    def adjusted(block):
        score = 0.0 if math.isnan(scores[block]) else scores[block]
        return score * (hysteresis if block in resident else 1)

    wanted = sorted(range(first, end), key=lambda block: (-adjusted(block), block))[:budget]
    missing = [block for block in wanted if block not in resident]

    def order(slot):
        if resident[slot] == -1:
            return (-2, slot)
        return (last_wanted[slot] if first <= resident[slot] < end else -1, slot)

    victims = sorted((s for s, block in enumerate(resident) if block not in wanted), key=order)
    pairs = list(zip(missing, victims, strict=False))[:cap]
    replaced = {slot for _, slot in pairs}
    updated = [
        STEP if block in wanted or slot in replaced else last_wanted[slot]
        for slot, block in enumerate(resident)
    ]
    return wanted, pairs, len(missing), updated


class Case:
    """Random rows; few different scores, so that there are ties, unless ``smooth``."""

    def __init__(self, rows, heads, blocks, slots, budget, cap, hysteresis, seed, *, smooth=False):
        generator = torch.Generator().manual_seed(seed)

        def draw(high, *shape):
            return torch.randint(max(high, 1), shape, generator=generator)

        self.options = {"budget": budget, "cap": cap, "hysteresis": hysteresis}
        self.scores = draw(5, rows, heads, blocks) / 4.0
        if smooth:
            self.scores = torch.rand(rows, heads, blocks, generator=generator) ** 8
        self.first = draw(4, rows).clamp(max=blocks)
        self.end = draw(blocks + 1, rows)
        self.end[-1] = blocks
        self.slots = draw(slots + 1, rows)
        self.slots[-1] = slots
        self.resident = torch.full((rows, heads, slots), -1)
        for part in self.resident.flatten(0, 1):
            count = int(draw(min(blocks, slots) + 1))
            places = torch.randperm(slots, generator=generator)[:count]
            part[places] = torch.randperm(blocks, generator=generator)[:count]
        self.last_wanted = draw(STEP + 1, rows, heads, slots) - 1
        index = torch.arange(blocks)
        self.candidates = (index >= self.first[:, None]) & (index < self.end[:, None])
        # Scores are read at candidates only.
        self.scores.masked_fill_(~self.candidates[:, None], math.nan)

    def check(self, backend, dtype=torch.int64, *, commit=True):
        resident, last_wanted = (
            t.to(dtype).to(DEVICE, copy=True) for t in (self.resident, self.last_wanted)
        )
        nan_scores = torch.tensor([3], dtype=torch.int32, device=DEVICE)
        first, end, slots = (t.to(DEVICE) for t in (self.first, self.end, self.slots))
        plan = load_op("plan", "plan_rows", backend)(
            self.scores.to(DEVICE), first, end, resident, last_wanted, slots,
            torch.tensor(STEP, device=DEVICE), nan_scores, commit=commit, **self.options,
        )  # fmt: skip
        assert {part.dtype for part in plan} == {torch.int64}
        assert resident.dtype == last_wanted.dtype == dtype
        bad = int((self.scores.isnan() & self.candidates[:, None]).sum())
        assert int(nan_scores) == 3 + bad
        for row in range(self.scores.shape[0]):
            for head in range(self.scores.shape[1]):
                got = [part[row, head].tolist() for part in (*plan, resident, last_wanted)]
                self._check_row(row, head, *got, commit=commit)

    def _check_row(self, row, head, wanted, sources, victims, misses, held, since, *, commit):
        used, budget = int(self.slots[row]), self.options["budget"]
        before = self.resident[row, head].tolist()
        ages = self.last_wanted[row, head].tolist()
        expected = plan_by_loop(
            self.scores[row, head].tolist(), int(self.first[row]), int(self.end[row]),
            before[:used], ages[:used], **self.options,
        )  # fmt: skip
        width = len(sources)
        cap = self.options["cap"]
        assert width == (min(budget, len(before)) if cap is None else cap)
        count = len(expected[0])
        assert sorted(wanted[:count]) == sorted(expected[0])
        assert wanted[count:] == [-1] * (budget - count)
        pairs = expected[1]
        assert sources == [block for block, _ in pairs] + [-1] * (width - len(pairs))
        assert victims == [slot for _, slot in pairs] + [-1] * (width - len(pairs))
        assert misses == expected[2]
        assert since == expected[3] + ages[used:]
        if commit:
            for block, slot in pairs:
                before[slot] = block
        assert held == before


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3), heads=st.integers(1, 2), blocks=st.integers(0, 30),
    slots=st.integers(0, 11), budget=st.integers(0, 12), cap=st.none() | st.integers(0, 13),
    hysteresis=st.sampled_from([0.5, 1.0, 2.0]), seed=st.integers(0, 2**32),
    commit=st.booleans(),
)  # fmt: skip
@both
def test_plan_is_its_definition(backend, commit, **sizes):
    Case(**sizes).check(backend, commit=commit)


# rows, heads, blocks, slots, budget, cap
LARGE = [(3, 2, 1000, 192, 128, 13), (2, 1, 333, 100, 60, None), (2, 1, 100, 192, 128, 13)]


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("sizes", LARGE)
@both
def test_odd_sizes(sizes, smooth, backend):
    Case(*sizes, 2.0, 1, smooth=smooth).check(backend, torch.int32)


@pytest.mark.parametrize("blocks", [4097, 8192])
@both
def test_rows_longer_than_the_registers(blocks, backend):
    case = Case(1, 1, blocks, 192, 128, 13, 1.5, 2, smooth=True)
    case.first[0] = 2500
    case.check(backend)
    case.scores = (case.scores * 4).round() / 4
    case.check(backend)


@both
def test_nan_scores_count_as_zero_and_are_counted(backend):
    case = Case(2, 2, 20, 6, 8, 4, 2.0, 3)
    case.first[:], case.end[:] = 1, 20
    case.scores[:, :, 0] = math.nan
    case.scores[:, :, 1:] = torch.arange(19) / 4.0
    case.candidates[:] = torch.arange(20) >= 1
    case.scores[0, 1, 18:] = math.nan
    case.check(backend)


@both
def test_the_last_of_a_tie_keeps_its_slot(backend):
    case = Case(1, 1, 6, 2, 3, None, 1.0, 0)
    case.first[:], case.end[:] = 0, 6
    case.candidates[:] = True
    case.scores[:] = 0.5
    case.resident[0, 0] = torch.tensor([2, 3])
    case.check(backend)
    assert plan_by_loop([0.5] * 6, 0, 6, [2, 3], [0, 0], 3, None, 1.0)[1] == [(0, 1)]


@both
def test_scores_of_every_size_keep_their_order(backend):
    """Denormal, huge and infinite scores, and zeros of both signs, which are a tie."""
    values = [0.0, -0.0, 1e-45, 1e-38, 1e-7, 1.0, 3e38, math.inf]
    case = Case(1, 1, 24, 5, 9, 3, 1.0, 4)
    case.first[:], case.end[:] = 0, 24
    case.candidates[:] = True
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    case.scores[0, 0] = torch.tensor(values * 3)[order]
    case.check(backend)


@both
def test_step_by_step_the_map_stays_sound(backend):
    """Carried out in place for several steps: no block twice, caps kept, all misses served."""
    rows, heads, blocks, slots = 2, 2, 40, 10
    generator = torch.Generator().manual_seed(5)
    resident = torch.full((rows, heads, slots), -1, device=DEVICE)
    since = resident.clone()
    first, end = torch.tensor([1, 2], device=DEVICE), torch.tensor([40, 31], device=DEVICE)
    count = torch.tensor([10, 7], device=DEVICE)
    nan = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for step in range(6):
        scores = torch.rand(rows, heads, blocks, generator=generator).to(DEVICE)
        plan = load_op("plan", "plan_rows", backend)(
            scores, first, end, resident, since, count, torch.tensor([step], device=DEVICE), nan,
            budget=6, cap=4, hysteresis=1.5, commit=True,
        )  # fmt: skip
        assert bool((resident[1, :, 7:] == -1).all())
        for row, limit in ((0, 10), (1, 7)):
            for head in range(heads):
                held = [b for b in resident[row, head, :limit].tolist() if b >= 0]
                assert len(set(held)) == len(held)
                fetched = [b for b in plan.sources[row, head].tolist() if b >= 0]
                assert len(fetched) == min(4, int(plan.misses[row, head]))
                assert set(fetched) <= set(held)
    assert int(nan) == 0


@pytest.mark.parametrize("limits", [{"budget": -1}, {"cap": -2}])
@both
def test_negative_limits_are_refused(limits, backend):
    case = Case(1, 1, 5, 3, 2, None, 1.0, 0)
    case.options |= limits
    with pytest.raises(ValueError, match="must not be negative"):
        case.check(backend)
