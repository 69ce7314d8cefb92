"""What is measured while lanes decode: recall, attention mass and moves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.core.geometry import KVGeometry
from oasiskv.evals.lanes.rows import Part, Rows
from oasiskv.evals.policies import best_blocks


@dataclass(frozen=True)
class Picked:
    """Rows that are measured in a round.

    Args:
        questions: int64 ``[n]``.
        rows: int64 ``[n]``.
    """

    questions: Tensor
    rows: Tensor


class Sums:
    """Measurements of every question and lane, over rows.

    Args:
        geometry: of the model.
        shape: ``(Q, C)``.
        lanes: ``M``.
        device: where the rows are.
    """

    def __init__(
        self, geometry: KVGeometry, shape: tuple[int, ...], lanes: int, device: torch.device
    ) -> None:
        questions, blocks = shape
        layers, heads = geometry.num_layers, geometry.num_kv_heads
        size = (layers, heads, questions * lanes)
        # Shares of true attention covered, and of the best blocks attended to, summed over rows.
        self._mass, self._recall = (torch.zeros(size, device=device) for _ in range(2))
        self._measured = torch.zeros(questions * lanes, device=device)
        # Tiles chosen that were not chosen for the row before, and rows that have one before.
        self._moved = torch.zeros((questions, lanes), dtype=torch.int64, device=device)
        self._moved_rows = torch.zeros_like(self._moved)
        self._last = torch.zeros(
            (layers, questions, lanes, heads, blocks), dtype=torch.bool, device=device
        )
        self._has_last = torch.zeros((questions, lanes), dtype=torch.bool, device=device)
        self._round: list[tuple[Tensor, Tensor]] = []
        self._chosen: list[Tensor] = []

    def means(self, question: int, lane: int) -> tuple[Tensor | None, Tensor | None]:
        """Mass and recall, ``[layers, KV heads]`` each; None where none was measured."""
        at = question * self._moved.shape[1] + lane
        rows = self._measured[at]
        if not rows:
            return None, None
        return (self._mass[..., at] / rows).cpu(), (self._recall[..., at] / rows).cpu()

    def moves(self, question: int, lane: int) -> tuple[int, int]:
        """Tiles chosen that were not for the row before, and the number of such rows."""
        return int(self._moved[question, lane]), int(self._moved_rows[question, lane])

    def measure(
        self,
        picked: Picked,
        token_logits: Tensor,
        real: Tensor,
        attended: Tensor,
        chosen: Tensor,
        candidates: Tensor,
        counts: Tensor,
    ) -> None:
        """Measure rows of one layer; ``settle`` adds them up.

        Args:
            picked: the rows.
            token_logits: float ``[Q, H, N, G, C, B]``, -inf where a token comes later.
            real: bool ``[Q, C]``, blocks that are no padding.
            attended: bool ``[Q, N, Hq, C]``.
            chosen: bool ``[Q, N, Hq, C]``, those of them between sink and window.
            candidates: bool ``[Q, N, C]``.
            counts: int64 ``[N]``, slots.
        """
        at = (picked.questions, picked.rows)
        heads = token_logits.shape[1]
        # Indices on both sides of a slice: rows come first, ``[n, H, G, C, B]``.
        logits = token_logits[picked.questions, :, picked.rows]
        logits.masked_fill_(~real[picked.questions][:, None, None, :, None], -torch.inf)
        by_block = torch.unflatten(logits.flatten(-2).softmax(-1), -1, logits.shape[-2:]).sum(-1)
        seen = torch.unflatten(attended[at], 1, (heads, -1))
        covered = (by_block * seen).sum(-1).mean(-1)
        # As scores are: of each query head the share of what it gives to candidates.
        inside = by_block * candidates[at][:, None, None]
        shares = (inside / inside.sum(-1, keepdim=True).clamp(min=1e-30)).mean(2)
        ideal = best_blocks(shares[:, None], candidates[at][:, None], counts[picked.rows, None])
        ideal = ideal[:, 0]
        held = torch.unflatten(chosen[at], 1, (heads, -1)).any(2)
        found = (ideal & held).sum(-1) / ideal.sum(-1).clamp(min=1)
        self._round.append((covered, torch.where(ideal.any(-1), found, 1.0)))

    def settle(self, rows: Rows, picked: Picked, kept: Tensor) -> None:
        """Add what was measured in a round.

        Args:
            rows: the round.
            picked: the rows that were measured.
            kept: bool ``[Q, N]``; others held rejected drafts and do not count.
        """
        covered, found = (torch.stack(part) for part in zip(*self._round, strict=True))
        self._round = []
        weight = kept[picked.questions, picked.rows].float()
        at = picked.questions * self._moved.shape[1] + rows.lanes[picked.rows]
        self._measured.index_add_(0, at, weight)
        for total, part in ((self._mass, covered), (self._recall, found)):
            # [L, n, H] -> [L, H, n]
            total.index_add_(2, at, (part * weight[:, None]).mT)

    def move(self, chosen: Tensor) -> None:
        """Take what policies chose in one layer; ``settle_moves`` counts.

        Args:
            chosen: bool ``[Q, n, Hq, C]`` of their rows.
        """
        self._chosen.append(torch.unflatten(chosen, 2, (self._last.shape[3], -1)).any(3))

    def settle_moves(self, rows: Rows, part: Part) -> None:
        """Count what a fast tier of exactly the chosen tiles would fetch, row after row.

        Args:
            rows: the round.
            part: rows of policies, of which every lane has as many.
        """
        lanes = rows.running[part.running]
        split = (len(lanes), -1)
        tiles = torch.unflatten(torch.stack(self._chosen), 2, split)
        self._chosen = []
        last = self._last[:, :, lanes]
        before = torch.cat((last[:, :, :, None], tiles[:, :, :, :-1]), dim=3)
        counted = torch.unflatten(rows.valid[:, part.rows], 1, split).clone()
        counted[:, :, 0] &= self._has_last[:, lanes]
        moved = (tiles & ~before).sum((0, -1, -2))
        self._moved[:, lanes] += (moved * counted).sum(-1)
        self._moved_rows[:, lanes] += counted.sum(-1)
        self._last[:, :, lanes] = rows.newest(tiles.flatten(2, 3), last, part)
        self._has_last[:, lanes] |= rows.counts[:, part.running] > 0
