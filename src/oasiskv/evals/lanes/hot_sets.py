"""Hot sets of OasisKV's lanes at one budget: what the engine's tiering does, for all at once."""

import torch
from torch import Tensor

from oasiskv.config import OasisConfig
from oasiskv.core.selection import top_blocks
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
        order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : config.hot_blocks]
        # The least wanted first, so that among equally old slots the worst block goes first.
        blocks = order.flip(-1)[:, :, None]
        self._resident = blocks.expand(*shape, -1).clone()
        rank = torch.arange(config.hot_blocks, device=scores.device).flip(0)
        # Rounds count from 1; the prompt's end is 0.
        last_wanted = torch.where(rank < config.budget_blocks, 0, -1)
        self._last_wanted = last_wanted.expand_as(self._resident).clone()
        self._blocks = scores.shape[-1]
        self._predicted: tuple[Tensor, Tensor] | None = None
        self.mask = self._held()
        counts = (scores.shape[1], lanes)
        self.fetched, self.wanted, self.missed = (
            torch.zeros(counts, dtype=torch.int64, device=scores.device) for _ in range(3)
        )
        self._agreement = torch.zeros((2, *counts), device=scores.device)

    @property
    def candidates(self) -> Tensor:
        """Bool ``[Q, M, C]``, those of the last step."""
        assert self._predicted is not None
        return self._predicted[1]

    @property
    def agreement(self) -> Tensor:
        """``[Q, M]`` mean share of predicted blocks that own queries would have chosen; or NaN."""
        return self._agreement[0] / self._agreement[1]

    def compare(self, scores: Tensor, active: Tensor) -> None:
        """Compare what was predicted for a step with what its own query would choose.

        Args:
            scores: ``[L, Q, M, H, C]`` by the step's first query.
            active: bool ``[Q, M]``, lanes that made the step.
        """
        assert self._predicted is not None
        predicted, candidates = self._predicted
        actual = self._top(scores, candidates)
        over = (0, 3, 4)
        share = (actual & predicted).sum(over) / actual.sum(over)
        self._agreement[0] += share * active
        self._agreement[1] += active

    def step(self, scores: Tensor, candidates: Tensor, active: Tensor, number: int) -> None:
        """Want, plan and fetch.

        Args:
            scores: ``[L, Q, M, H, C]`` by the lookahead queries; 0 where a block is no candidate.
            candidates: bool ``[Q, M, C]``.
            active: bool ``[Q, M]``, lanes that made a step; the others are left as they are.
            number: of the step, from 1 on.
        """
        self._predicted = (self._top(scores, candidates), candidates)
        layers = scores.shape[0]
        plan = make_plan(
            scores.flatten(0, 2),
            candidates.expand(layers, -1, -1, -1).flatten(0, 2),
            self._resident.flatten(0, 2),
            self._last_wanted.flatten(0, 2),
            budget=self.config.budget_blocks,
            cap=self.config.cap_blocks,
            hysteresis=self.config.hysteresis,
            step=number,
        )
        shape = scores.shape[:4]
        victims, sources = (
            torch.unflatten(part, 0, shape[:3]) for part in (plan.victims, plan.sources)
        )
        victims = victims.masked_fill(~active[:, :, None, None], -1)
        slots = self._resident.shape[-1]
        # A column more takes pairs that are none.
        spare = torch.cat((self._resident, self._resident[..., :1]), dim=-1)
        spare.scatter_(-1, torch.where(victims >= 0, victims, slots), sources)
        self._resident = spare[..., :slots]
        last_wanted = torch.unflatten(plan.last_wanted, 0, shape[:3])
        kept = active[:, :, None, None]
        self._last_wanted = torch.where(kept, last_wanted, self._last_wanted)
        self.mask = self._held()
        over = (0, 3)
        self.fetched += (victims >= 0).sum(-1).sum(over)
        self.missed += torch.unflatten(plan.misses, 0, shape[:3]).sum(over) * active
        self.wanted += torch.unflatten((plan.wanted >= 0), 0, shape[:3]).sum((0, 3, 4)) * active

    def _top(self, scores: Tensor, candidates: Tensor) -> Tensor:
        allowed = candidates[:, :, None]
        ranked = scores.masked_fill(~allowed, -torch.inf)
        return top_blocks(ranked, self.config.budget_blocks) & allowed

    def _held(self) -> Tensor:
        mask = torch.zeros(
            (*self._resident.shape[:-1], self._blocks),
            dtype=torch.bool,
            device=self._resident.device,
        )
        return mask.scatter_(-1, self._resident, True)
