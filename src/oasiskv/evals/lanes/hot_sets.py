"""Hot sets of OasisKV's lanes at one budget: what the engine's tiering does, for all at once."""

import torch
from torch import Tensor

from oasiskv.config import OasisConfig
from oasiskv.core.selection import least_wanted_first, top_blocks
from oasiskv.ops.plan.reference import make_plan


class HotSets:
    """Resident maps ``[L, Q, M, H, S]`` of ``M`` lanes, and what their steps want and move.

    Transfers are complete before the next step, as those of the engine are.

    Args:
        config: settings of these lanes; drafts and lookahead mode are the lanes' own affair.
        scores: ``[L, Q, H, C]`` float, what the prompt's last queries expect of each block.
        candidates: bool ``[Q, C]``, blocks between sink and window at the prompt's end; at least as
            many as there are slots.
        lanes: ``M``.

    Attributes:
        mask: bool ``[L, Q, M, H, C]``, blocks that are held.
        fetched: int64 ``[Q, M]`` tiles moved so far.
        wanted: int64 ``[Q, M]`` tiles wanted so far.
        missed: int64 ``[Q, M]`` those of them that were in no slot.
    """

    def __init__(self, config: OasisConfig, scores: Tensor, candidates: Tensor, lanes: int) -> None:
        self.config = config
        shape = (scores.shape[0], scores.shape[1], lanes, scores.shape[2])
        ranked = scores.masked_fill(~candidates[:, None], -torch.inf)
        blocks, wanted = least_wanted_first(ranked, config.hot_blocks, config.budget_blocks)
        self._resident = blocks[:, :, None].expand(*shape, -1).clone()
        # Rounds count from 1; the prompt's end is 0.
        last_wanted = torch.where(wanted, 0, -1)
        self._last_wanted = last_wanted[:, :, None].expand(*shape, -1).clone()
        mask_shape = (*shape, scores.shape[-1])
        self.mask = torch.zeros(mask_shape, dtype=torch.bool, device=scores.device)
        self.mask.scatter_(-1, self._resident, True)
        self._predicted = torch.zeros_like(self.mask)
        self._candidates = candidates[:, None].repeat(1, lanes, 1)
        counts = (scores.shape[1], lanes)
        self.fetched, self.wanted, self.missed = (
            torch.zeros(counts, dtype=torch.int64, device=scores.device) for _ in range(3)
        )
        self._agreement = torch.zeros((2, *counts), device=scores.device)

    @property
    def agreement(self) -> Tensor:
        """``[Q, M]`` mean share of predicted blocks that own queries would have chosen; or NaN."""
        return self._agreement[0] / self._agreement[1]

    def candidates(self, lanes: Tensor) -> Tensor:
        """Bool ``[Q, m, C]``, those of the last step of some lanes, int64 ``[m]``."""
        return self._candidates[:, lanes]

    def compare(self, lanes: Tensor, scores: Tensor, active: Tensor) -> None:
        """Compare what was predicted for a step with what its own query would choose.

        Args:
            lanes: int64 ``[m]``, which made a second step or a later one.
            scores: ``[L, Q, m, H, C]`` by the step's first query.
            active: bool ``[Q, m]``, lanes that made the step.
        """
        actual = self._top(scores, self._candidates[:, lanes])
        over = (0, 3, 4)
        share = (actual & self._predicted[:, :, lanes]).sum(over) / actual.sum(over)
        sums, steps = self._agreement
        sums[:, lanes] += share * active
        steps[:, lanes] += active

    def step(
        self, lanes: Tensor, scores: Tensor, candidates: Tensor, active: Tensor, number: int
    ) -> None:
        """Want, plan and fetch.

        Args:
            lanes: int64 ``[m]``, those that some question made a step in.
            scores: ``[L, Q, m, H, C]`` by the lookahead queries; 0 where a block is no candidate.
            candidates: bool ``[Q, m, C]``.
            active: bool ``[Q, m]``, lanes that made a step; the others are left as they are.
            number: of the step, from 1 on.
        """
        self._predicted[:, :, lanes] = self._top(scores, candidates)
        self._candidates[:, lanes] = candidates
        layers = scores.shape[0]
        resident = self._resident[:, :, lanes]
        before = self._last_wanted[:, :, lanes]
        plan = make_plan(
            scores.flatten(0, 2),
            candidates.expand(layers, -1, -1, -1).flatten(0, 2),
            resident.flatten(0, 2),
            before.flatten(0, 2),
            budget=self.config.budget_blocks,
            cap=self.config.cap_blocks,
            hysteresis=self.config.hysteresis,
            step=number,
        )
        lead = scores.shape[:3]
        victims, sources, last_wanted = (
            torch.unflatten(part, 0, lead)
            for part in (plan.victims, plan.sources, plan.last_wanted)
        )
        kept = active[:, :, None, None]
        victims = victims.masked_fill(~kept, -1)
        slots = resident.shape[-1]
        # A column more takes pairs that are none.
        spare = torch.cat((resident, resident[..., :1]), dim=-1)
        spare.scatter_(-1, torch.where(victims >= 0, victims, slots), sources)
        resident = spare[..., :slots]
        self._resident[:, :, lanes] = resident
        self._last_wanted[:, :, lanes] = torch.where(kept, last_wanted, before)
        self.mask[:, :, lanes] = torch.zeros_like(self.mask[:, :, lanes]).scatter_(
            -1, resident, True
        )
        over = (0, 3)
        misses, wanted = (
            torch.unflatten(part, 0, lead).sum(over)
            for part in (plan.misses, (plan.wanted >= 0).sum(-1))
        )
        self.fetched[:, lanes] += (victims >= 0).sum(-1).sum(over)
        self.missed[:, lanes] += misses * active
        self.wanted[:, lanes] += wanted * active

    def _top(self, scores: Tensor, candidates: Tensor) -> Tensor:
        allowed = candidates[:, :, None]
        ranked = scores.masked_fill(~allowed, -torch.inf)
        return top_blocks(ranked, self.config.budget_blocks) & allowed
