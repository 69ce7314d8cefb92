"""Wanted blocks and the swap plan in Triton, one program per request and KV head.

Arguments of one dimension are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oasiskv.ops.plan.reference import RowsPlan, check_limits

# Up to this many blocks a row stays in registers; longer rows are read again for each bit.
_MOST_BLOCKS_IN_REGISTERS = 4096
_TILE_BLOCKS = 2048
_WARPS = 4


def plan_rows(
    scores: Tensor,
    first: Tensor,
    end: Tensor,
    resident: Tensor,
    last_wanted: Tensor,
    slots: Tensor,
    step: Tensor,
    nan_scores: Tensor,
    *,
    budget: int,
    cap: int | None,
    hysteresis: float,
    commit: bool = False,
) -> RowsPlan:
    """As ``reference.plan_rows``, without synchronisation: shapes are maxima.

    A score that is not negative orders like its bits, so the threshold is found bit by bit, 31
    counts over the row, and no row is sorted. Ties are cut by block index with a running sum. The
    pairs of the plan, few of them, are taken one by one: best missing block, oldest slot.

    Floor: scores read once, ``4 N`` bytes per row and KV head, and 16 bytes per slot: 2 MiB of
    scores at ``R = 64, H = 8, N = 1,024``, under 1 us. What it takes is the latency of about 45
    block-wide reductions, and two more per pair.
    """
    check_limits(budget, cap)
    _check_contiguous(scores=scores, resident=resident, last_wanted=last_wanted)
    num_rows, num_heads, num_blocks = scores.shape
    num_slots = resident.shape[2]
    width = min(budget, num_slots) if cap is None else cap
    shape = (num_rows, num_heads)
    device = scores.device
    wanted = torch.empty((*shape, budget), dtype=torch.int64, device=device)
    sources = torch.empty((*shape, width), dtype=torch.int64, device=device)
    victims = torch.empty_like(sources)
    misses = torch.empty(shape, dtype=torch.int64, device=device)
    keys = torch.empty((*shape, num_blocks), dtype=torch.int32, device=device)
    blocks = _padded(num_blocks)
    whole = blocks <= _MOST_BLOCKS_IN_REGISTERS
    _plan_kernel[shape[::-1]](
        scores, first, end, resident, last_wanted, slots, step, nan_scores,
        keys, wanted, sources, victims, misses,
        num_blocks, num_slots, budget, width, float(hysteresis),
        BUDGET_PADDED=_padded(budget), WIDTH_PADDED=_padded(width),
        SLOTS_PADDED=_padded(num_slots),
        BLOCKS=blocks if whole else _TILE_BLOCKS, WHOLE=whole, COMMIT=commit,
        num_warps=_WARPS,
    )  # fmt: skip
    return RowsPlan(wanted, sources, victims, misses)


def _padded(size: int) -> int:
    """A power of 2 that is enough; not below 64, so that small sizes share a compiled kernel."""
    return max(64, int(triton.next_power_of_2(size)))


def _check_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; found strides {tensor.stride()}")


# A key is 1 + the bits of an adjusted score, so at least 1, and orders like it; the sign bit marks
# blocks that are resident. Keys of one row and KV head pass between threads through global memory.


@triton.jit
def _key_of(score):
    """Key of a score; one that is NaN counts as 0."""
    return tl.where(score > 0, score, 0.0).to(tl.int32, bitcast=True) + 1


@triton.jit
def _write_keys(scores, keys, lower, upper, BLOCKS: tl.constexpr):
    """Keys of the candidates, nothing resident yet; returns how many scores were NaN."""
    bad = tl.zeros([BLOCKS], tl.int32)
    for start in range(lower // BLOCKS * BLOCKS, upper, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        candidate = (block >= lower) & (block < upper)
        score = tl.load(scores + block, mask=candidate, other=0.0)
        bad += (score != score).to(tl.int32)
        tl.store(keys + block, _key_of(score), mask=candidate)
    return tl.sum(bad, axis=0)


@triton.jit
def _load_keys(keys, start, lower, upper, BLOCKS: tl.constexpr):
    """``(blocks, keys with their sign bit)`` of a tile; keys are 0 outside the candidates."""
    block = start + tl.arange(0, BLOCKS)
    candidate = (block >= lower) & (block < upper)
    return block, tl.load(keys + block, mask=candidate, other=0)


@triton.jit
def _threshold(keys, lower, upper, budget, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    """``(key of the budget-th best candidate or 1, how many are better)``."""
    lowest_tile = lower // BLOCKS * BLOCKS
    _, row = _load_keys(keys, lowest_tile, lower, upper, BLOCKS)
    row &= 0x7FFFFFFF
    threshold = lower * 0
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        if WHOLE:
            count = (row >= trial).to(tl.int32)
        else:
            count = tl.zeros([BLOCKS], tl.int32)
            for start in range(lowest_tile, upper, BLOCKS):
                _, key = _load_keys(keys, start, lower, upper, BLOCKS)
                count += ((key & 0x7FFFFFFF) >= trial).to(tl.int32)
        threshold = tl.where(tl.sum(count, axis=0) >= budget, trial, threshold)
    threshold = tl.maximum(threshold, 1)
    above = tl.zeros([BLOCKS], tl.int32)
    for start in range(lowest_tile, upper, BLOCKS):
        _, key = _load_keys(keys, start, lower, upper, BLOCKS)
        above += ((key & 0x7FFFFFFF) > threshold).to(tl.int32)
    return threshold, tl.sum(above, axis=0)


@triton.jit
def _write_wanted(keys, wanted, lower, upper, threshold, ties, BLOCKS: tl.constexpr):
    """Wanted blocks in order; returns ``(how many, last block taken of those at threshold)``."""
    count = lower * 0
    equal = lower * 0
    last = lower * 0 - 1
    for start in range(lower // BLOCKS * BLOCKS, upper, BLOCKS):
        block, key = _load_keys(keys, start, lower, upper, BLOCKS)
        key &= 0x7FFFFFFF
        tie = (key == threshold).to(tl.int32)
        taken = (tie > 0) & (equal + tl.cumsum(tie, axis=0) <= ties)
        last = tl.maximum(last, tl.max(tl.where(taken, block, -1), axis=0))
        chosen = (taken | (key > threshold)).to(tl.int32)
        place = count + tl.cumsum(chosen, axis=0) - 1
        tl.store(wanted + place, block.to(tl.int64), mask=chosen > 0)
        equal += tl.sum(tie, axis=0)
        count += tl.sum(chosen, axis=0)
    return count, last


@triton.jit
def _plan_kernel(
    scores, first, end, resident, last_wanted, slots, step, nan_scores,
    keys, wanted, sources, victims, misses,
    num_blocks, num_slots, budget, width, hysteresis,
    BUDGET_PADDED: tl.constexpr, WIDTH_PADDED: tl.constexpr, SLOTS_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr, WHOLE: tl.constexpr, COMMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    pair = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    lower = tl.maximum(tl.load(first + row).to(tl.int32), 0)
    upper = tl.minimum(tl.load(end + row).to(tl.int32), num_blocks)
    scores += pair * num_blocks
    keys += pair * num_blocks
    resident += pair * num_slots
    last_wanted += pair * num_slots
    wanted += pair * budget
    sources += pair * width
    victims += pair * width

    bad = _write_keys(scores, keys, lower, upper, BLOCKS)
    if bad > 0:
        tl.atomic_add(nan_scores, bad)
    slot = tl.arange(0, SLOTS_PADDED)
    used = slot < tl.minimum(tl.load(slots + row).to(tl.int32), num_slots)
    block = tl.load(resident + slot, mask=used, other=-1).to(tl.int32)
    held = (block >= lower) & (block < upper)
    score = tl.load(scores + block, mask=held, other=0.0)
    tl.debug_barrier()
    tl.store(keys + block, _key_of(score * hysteresis) | (-2147483648), mask=held)
    tl.debug_barrier()

    threshold, above = _threshold(keys, lower, upper, budget, BLOCKS, WHOLE)
    ties = budget - above
    count, last = _write_wanted(keys, wanted, lower, upper, threshold, ties, BLOCKS)
    place = tl.arange(0, BUDGET_PADDED)
    nothing = tl.full([BUDGET_PADDED], -1, tl.int64)
    tl.store(wanted + place, nothing, mask=(place >= count) & (place < budget))
    tl.debug_barrier()

    # Missing blocks as numbers that order by key, then lower block; taken or resident ones are -1.
    chosen = tl.load(wanted + place, mask=place < count, other=-1)
    key = tl.load(keys + chosen, mask=place < count, other=-1)
    missing = tl.where(key > 0, (key.to(tl.int64) << 32) | (0x7FFFFFFF - chosen), -1)
    num_missing = tl.sum((missing >= 0).to(tl.int32), axis=0)
    tl.store(misses + pair, num_missing.to(tl.int64))

    # Slots as numbers that order by age, then lower slot: empty, never wanted, then by step.
    key = tl.load(keys + block, mask=held, other=0) & 0x7FFFFFFF
    keeps = held & ((key > threshold) | ((key == threshold) & (block <= last)))
    since = tl.load(last_wanted + slot, mask=used, other=-1).to(tl.int64)
    age = tl.where(block < 0, 0, tl.where(held, since + 2, 1))
    free = used & ~keeps
    order = tl.where(free, (age << 32) | slot, 0x7FFFFFFFFFFFFFFF)
    pairs = tl.minimum(num_missing, tl.sum(free.to(tl.int32), axis=0))
    pairs = tl.minimum(pairs, width)
    place = tl.arange(0, WIDTH_PADDED)
    nothing = tl.full([WIDTH_PADDED], -1, tl.int64)
    unused = (place >= pairs) & (place < width)
    tl.store(sources + place, nothing, mask=unused)
    tl.store(victims + place, nothing, mask=unused)
    for index in range(pairs):
        best = tl.max(missing, axis=0)
        oldest = tl.min(order, axis=0)
        source = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        tl.store(sources + index, source)
        tl.store(victims + index, oldest & 0xFFFFFFFF)
        missing = tl.where(missing == best, -1, missing)
        hit = order == oldest
        block = tl.where(hit, source.to(tl.int32), block)
        keeps |= hit
        order = tl.where(hit, 0x7FFFFFFFFFFFFFFF, order)
    # No thread may still be about to read what changes in place.
    tl.debug_barrier()
    now = tl.load(step).to(last_wanted.dtype.element_ty)
    tl.store(last_wanted + slot, now + tl.zeros([SLOTS_PADDED], now.dtype), mask=used & keeps)
    if COMMIT:
        tl.store(resident + slot, block.to(resident.dtype.element_ty), mask=used)
