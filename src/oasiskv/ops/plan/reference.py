"""Wanted blocks and the swap plan, in plain PyTorch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """What each layer and KV head wants next, and the transfers that bring it.

    ``R`` rows (a row is one layer of one request), ``H`` KV heads, ``K`` budget, ``S`` slots, ``C``
    the cap, or ``min(K, S)`` without one. All int64, on the device of the scores.

    Attributes:
        wanted: ``[R, H, K]``, block indices, best first, padded with -1 at the end.
        sources: ``[R, H, C]``, blocks to fetch, best first, padded with -1 at the end.
        victims: ``[R, H, C]``, slot that ``sources`` at the same place overwrites; -1 where that is
            -1.
        misses: ``[R, H]``, wanted blocks that are not resident, before cap and free slots limit the
            plan.
        last_wanted: ``[R, H, S]``, step at which the block of each slot was last wanted, as it is
            once the plan is carried out.
    """

    wanted: Tensor
    sources: Tensor
    victims: Tensor
    misses: Tensor
    last_wanted: Tensor


def make_plan(
    scores: Tensor,
    candidates: Tensor,
    resident: Tensor,
    last_wanted: Tensor,
    *,
    budget: int,
    cap: int | None,
    hysteresis: float,
    step: int,
) -> Plan:
    """Choose the wanted blocks and pair the missing ones with slots to overwrite.

    - Wanted: the ``min(K, candidates of the row)`` candidates of the highest adjusted score, the
      score times ``hysteresis`` where the block is resident (product in the dtype of ``scores``).
      Ties go to the lower block index. A candidate with score 0 still counts.
    - Missing: wanted blocks that are not resident, in the order of wanted.
    - Victims: slots whose block is not wanted. Empty slots first, then least recently wanted first;
      a resident block that is no candidate any more counts as never wanted. Ties go to the lower
      slot.
    - The plan is the first ``min(cap, missing, victims)`` of both, in pairs.
    - ``last_wanted`` becomes ``step`` where the slot's block is wanted and where the plan puts a
      wanted block; elsewhere it stays.

    The inputs are not modified.

    Args:
        scores: ``[R, H, N]``, any float dtype, not negative; read at candidates only.
        candidates: bool ``[R, N]``, blocks that may be wanted; rows may have different numbers of
            them.
        resident: int64 ``[R, H, S]``, block index below ``N`` in each slot, -1 for an empty slot.
            No block twice in one row and head; that is not checked.
        last_wanted: int64 ``[R, H, S]``, step number, -1 for never; not read for empty slots.
        budget: ``K`` in blocks.
        cap: most blocks fetched per row and KV head; None for no cap.
        hysteresis: factor on the scores of resident blocks, 1 for none.
        step: number of this step, not negative.

    Returns:
        The plan; ``N``, ``S``, ``K`` and ``C`` may be 0 and in any order.

    Raises:
        ValueError: ``budget`` or ``cap`` is negative, or a candidate's score is NaN.
    """
    check_limits(budget, cap)
    num_blocks, num_slots = scores.shape[2], resident.shape[2]
    allowed = candidates[:, None, :].expand_as(scores)
    nan = int((scores.isnan() & allowed).sum())
    if nan:
        raise ValueError(
            f"{nan} of {int(allowed.sum())} scores of candidate blocks are NaN: a digest or a "
            "lookahead query was read before it was written"
        )

    is_resident = _mark(resident, num_blocks)
    adjusted = torch.where(is_resident, scores * hysteresis, scores)
    adjusted = adjusted.masked_fill(~allowed, -math.inf)
    ranked = adjusted.argsort(dim=-1, descending=True, stable=True)[..., :budget]
    rank = torch.arange(ranked.shape[-1], device=scores.device)
    wanted = _pad(ranked.masked_fill(rank >= candidates.sum(-1)[:, None, None], -1), budget)
    is_wanted = _mark(wanted, num_blocks)

    missing = (wanted >= 0) & ~_look_up(is_resident, wanted)
    misses = missing.sum(-1)
    # A stable sort of the flag moves the missing blocks to the front and keeps their order.
    sources = wanted.gather(-1, (~missing).long().argsort(dim=-1, stable=True))

    slot_wanted = _look_up(is_wanted, resident)
    still_candidate = _look_up(allowed, resident)
    age = torch.where(still_candidate, last_wanted, -1).masked_fill(resident < 0, -2)
    age = age.masked_fill(slot_wanted, torch.iinfo(torch.int64).max)
    victims = age.argsort(dim=-1, stable=True)

    width = min(budget, num_slots) if cap is None else cap
    pairs = torch.minimum(misses, (~slot_wanted).sum(-1))
    unused = torch.arange(width, device=scores.device) >= pairs[..., None]
    sources = _pad(sources, width).masked_fill(unused, -1)
    victims = _pad(victims, width).masked_fill(unused, -1)
    slot_wanted = slot_wanted | _mark(victims, num_slots)
    return Plan(wanted, sources, victims, misses, torch.where(slot_wanted, step, last_wanted))


class RowsPlan(NamedTuple):
    """The plan of one layer for the sparse requests of a step.

    ``R`` rows (requests), ``H`` KV heads, ``K`` budget, ``S`` slots, ``C`` the cap, or
    ``min(K, S)`` without one. All int64, on the device of the scores.

    Attributes:
        wanted: ``[R, H, K]``, blocks of the request in any order, padded with -1 at the end.
        sources: ``[R, H, C]``, blocks to fetch, best first, padded with -1 at the end.
        victims: ``[R, H, C]``, slot that ``sources`` at the same place overwrites; -1 where that is
            -1.
        misses: ``[R, H]``, wanted blocks that are not resident, before cap and free slots limit the
            plan.
    """

    wanted: Tensor
    sources: Tensor
    victims: Tensor
    misses: Tensor


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
    """``make_plan`` of one layer for requests of different lengths, carried out at once.

    Candidates of row ``r`` are its blocks ``first[r]`` to ``end[r] - 1``; only its first
    ``slots[r]`` slots are looked at and changed. A NaN score cannot stop a GPU: it counts as 0, and
    ``nan_scores`` grows by one.

    Args:
        scores: float32 ``[R, H, N]``, not negative; read at candidates only.
        first: integer ``[R]``.
        end: integer ``[R]``, at most ``N``; no candidates where ``end <= first``.
        resident: integer ``[R, H, S]``, block of the request in each slot, -1 for an empty one.
            With ``commit``, ``sources`` are put at their ``victims``, in place.
        last_wanted: integer ``[R, H, S]``, step number, -1 for never; updated in place.
        slots: integer ``[R]``, slots in use, at most ``S``.
        step: integer, one element: number of this step.
        nan_scores: int32, one element: NaN scores of candidates so far; updated in place.
        budget: ``K`` in blocks.
        cap: most blocks fetched per row and KV head; None for no cap.
        hysteresis: factor on the scores of resident blocks, 1 for none; not negative.
        commit: whether to update ``resident``; the transfers must then be waited for before the
            slots are read.

    Returns:
        The plan; ``N``, ``S``, ``K`` and ``C`` may be 0 and in any order.

    Raises:
        ValueError: ``budget`` or ``cap`` is negative.
    """
    check_limits(budget, cap)
    num_rows, num_heads, num_blocks = scores.shape
    width = min(budget, resident.shape[2]) if cap is None else cap
    block = torch.arange(num_blocks, device=scores.device)
    candidates = (block >= first[:, None]) & (block < end[:, None])
    nan = scores.isnan() & candidates[:, None]
    nan_scores += nan.sum().to(nan_scores.dtype)
    clean = scores.masked_fill(nan, 0)
    wanted = torch.full((num_rows, num_heads, budget), -1, device=scores.device)
    sources = torch.full((num_rows, num_heads, width), -1, device=scores.device)
    victims, misses = sources.clone(), sources.new_zeros(num_rows, num_heads)
    for row, used in enumerate(slots.tolist()):
        plan = make_plan(
            clean[row : row + 1],
            candidates[row : row + 1],
            resident[row : row + 1, :, :used].long(),
            last_wanted[row : row + 1, :, :used].long(),
            budget=budget,
            cap=cap,
            hysteresis=hysteresis,
            step=int(step),
        )
        wanted[row], misses[row] = plan.wanted[0], plan.misses[0]
        cut = plan.sources.shape[-1]
        sources[row, :, :cut], victims[row, :, :cut] = plan.sources[0], plan.victims[0]
        last_wanted[row, :, :used] = plan.last_wanted[0].to(last_wanted.dtype)
    if commit:
        rows, heads, pairs = (victims >= 0).nonzero(as_tuple=True)
        fetched = sources[rows, heads, pairs].to(resident.dtype)
        resident[rows, heads, victims[rows, heads, pairs]] = fetched
    return RowsPlan(wanted, sources, victims, misses)


def check_limits(budget: int, cap: int | None) -> None:
    """Refuse a negative budget or cap, in blocks.

    Raises:
        ValueError: with both.
    """
    if budget < 0 or (cap is not None and cap < 0):
        raise ValueError(f"budget and cap must not be negative; found {budget} and {cap} blocks")


def _mark(indices: Tensor, size: int) -> Tensor:
    """bool ``[R, H, size]``: True at ``indices`` ``[R, H, any]``, whose -1 marks nothing."""
    marks = torch.zeros((*indices.shape[:2], size + 1), dtype=torch.bool, device=indices.device)
    return marks.scatter_(-1, torch.where(indices < 0, size, indices), True)[..., :size]


def _look_up(marks: Tensor, indices: Tensor) -> Tensor:
    """``marks`` ``[R, H, size]`` at ``indices`` ``[R, H, any]``; False at -1."""
    if marks.shape[-1] == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    return marks.gather(-1, indices.clamp(min=0)) & (indices >= 0)


def _pad(indices: Tensor, width: int) -> Tensor:
    """The first ``width`` of the last dimension, padded with -1 where there are fewer."""
    padding = max(0, width - indices.shape[-1])
    return torch.nn.functional.pad(indices[..., :width], (0, padding), value=-1)
