"""The rows of one round: which tokens every lane computes, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.config import BLOCK_TOKENS


@dataclass(frozen=True)
class Segment:
    """Tokens of one question that one lane computes in a round.

    Args:
        tokens: token ids; none where the lane has ended the question.
        start: position of the first.
    """

    tokens: Sequence[int]
    start: int


@dataclass(frozen=True)
class LaneRows:
    """Rows of one lane, the same for every question.

    Args:
        lane: the lane.
        first: its first row.
        width: how many there are: the most that a question needs.
    """

    lane: int
    first: int
    width: int


@dataclass(frozen=True)
class Part:
    """Rows of neighbouring lanes.

    Args:
        rows: where they are.
        running: which of the lanes that compute they are of.
    """

    rows: slice
    running: slice


@dataclass(frozen=True)
class Rows:
    """One round. Where a question needs fewer rows than another, rows of padding follow its own.

    ``R`` lanes compute in it.

    Args:
        by_lane: lanes that compute, in order.
        tokens: int64 ``[Q, N]``.
        positions: int64 ``[Q, N]``.
        lanes: int64 ``[N]``.
        writers: int64 ``[Q, N]``: ``lanes``, but the spare lane for padding.
        valid: bool ``[Q, N]``, no padding.
        starts: int64 ``[Q, N]``, position of the first row of the same lane and question.
        running: int64 ``[R]``, the lanes.
        firsts: int64 ``[R]``, first row of each.
        counts: int64 ``[Q, R]``, rows of each that are none of padding.
        questions: int64 ``[Q, 1]``, 0 to Q - 1.
        last: int64 ``[Q, R]``, the last row of each that is none of padding; the first if all are.
        some: bool ``[Q, R]``, not all are padding; None if that is so everywhere.
    """

    by_lane: list[LaneRows]
    tokens: Tensor
    positions: Tensor
    lanes: Tensor
    writers: Tensor
    valid: Tensor
    starts: Tensor
    running: Tensor
    firsts: Tensor
    counts: Tensor
    questions: Tensor
    last: Tensor
    some: Tensor | None

    def part(self, lanes: range) -> Part | None:
        """Rows of some lanes; None if none of them computes."""
        own = [index for index, each in enumerate(self.by_lane) if each.lane in lanes]
        if not own:
            return None
        first, last = self.by_lane[own[0]], self.by_lane[own[-1]]
        return Part(slice(first.first, last.first + last.width), slice(own[0], own[-1] + 1))

    def newest(self, rows: Tensor, before: Tensor, part: Part) -> Tensor:
        """Last row of each lane of a part that is none of padding.

        Args:
            rows: ``[L, Q, n, ...]``, rows of the part in all layers.
            before: ``[L, Q, R, ...]`` of its lanes, what to give where there is padding only.
            part: the part.
        """
        newest = rows[:, self.questions, self.last[:, part.running] - part.rows.start]
        if self.some is None:
            return newest
        some = self.some[:, part.running]
        return torch.where(some.reshape(*some.shape, *[1] * (rows.dim() - 3)), newest, before)


def lay_out(segments: Sequence[Sequence[Segment]], spare: int, device: torch.device) -> Rows:
    """Put what lanes compute in rows.

    Args:
        segments: of each question, of each lane.
        spare: lane that takes what padding writes.
        device: where the tensors go.
    """
    by_lane: list[LaneRows] = []
    first = 0
    for lane in range(len(segments[0])):
        width = max(len(own[lane].tokens) for own in segments)
        if width:
            by_lane.append(LaneRows(lane, first, width))
            first += width
    table = [[_fill(own[each.lane], each, spare) for each in by_lane] for own in segments]
    numbers = torch.tensor(
        [[[n for part in own for n in part[kind]] for kind in range(5)] for own in table],
        device=device,
    )
    tokens, positions, writers, valid, starts = numbers.unbind(1)
    running, firsts = torch.tensor([(each.lane, each.first) for each in by_lane], device=device).T
    widths = torch.tensor([each.width for each in by_lane], device=device)
    counts = torch.tensor(
        [[len(own[each.lane].tokens) for each in by_lane] for own in segments], device=device
    )
    return Rows(
        by_lane,
        tokens,
        positions,
        running.repeat_interleave(widths),
        writers,
        valid.bool(),
        starts,
        running,
        firsts,
        counts,
        torch.arange(len(segments), device=device)[:, None],
        firsts + (counts - 1).clamp(min=0),
        None if all(own[each.lane].tokens for each in by_lane for own in segments) else counts > 0,
    )


def _fill(segment: Segment, rows: LaneRows, spare: int) -> tuple[list[int], ...]:
    count = len(segment.tokens)
    missing = rows.width - count
    # Padding stands where the segment starts and sees what that row sees: nothing is undefined.
    return (
        [*segment.tokens, *[0] * missing],
        [*range(segment.start, segment.start + count), *[segment.start] * missing],
        [rows.lane] * count + [spare] * missing,
        [1] * count + [0] * missing,
        [segment.start] * rows.width,
    )


def window_start(positions: Tensor, window_blocks: int) -> Tensor:
    """First block of the window of a token at each position."""
    return (positions // BLOCK_TOKENS - window_blocks).clamp(min=0)
