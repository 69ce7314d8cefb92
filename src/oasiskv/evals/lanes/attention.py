"""Attention of all lanes' rows in one forward: everything is there, a mask says what is seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.config import OasisConfig
from oasiskv.evals.lanes.hot_sets import HotSets
from oasiskv.evals.lanes.kv import LaneKV, by_kv_head
from oasiskv.evals.lanes.rows import Part, Rows, window_start
from oasiskv.evals.lanes.sums import Picked, Sums
from oasiskv.evals.policies import LayerView, Policy


@dataclass
class Group:
    """Neighbouring lanes that choose in one way.

    Args:
        lanes: their numbers.
        chooser: how: a policy for each row, or hot sets that hold for all rows of a step.
    """

    lanes: range
    chooser: Policy | HotSets


@dataclass
class _Round:
    """What is the same in all layers.

    Args:
        rows: what is computed.
        picked: rows to measure.
        groups: those that compute, with their rows.
        policies: the rows of all policies.
        candidates: bool ``[Q, N, C]``.
        unseen: bool ``[Q, N, C, B]``, tokens after a row's own.
        counts: int64 ``[N]``, blocks that a row may choose.
    """

    rows: Rows
    picked: Picked | None
    groups: list[tuple[Group, Part]]
    policies: Part | None
    candidates: Tensor
    unseen: Tensor
    counts: Tensor


class LaneAttention:
    """Implements ``AttentionBatch`` for all rows of a round.

    Args:
        kv: keys and values.
        config: sizes of sink and window.
        counts: int64 ``[M]``, blocks that each lane may choose.
        sums: takes measurements.

    Attributes:
        queries: of the last forward, one ``[Q, N, Hq, D]`` a layer.
    """

    def __init__(self, kv: LaneKV, config: OasisConfig, counts: Tensor, sums: Sums) -> None:
        self._kv, self._config, self._counts, self._sums = kv, config, counts, sums
        self._round: _Round | None = None
        self._before: dict[int, Tensor] = {}
        self.queries: list[Tensor] = []

    def begin(self, rows: Rows, picked: Picked | None, groups: list[Group]) -> None:
        """The next forward.

        Args:
            rows: what it computes.
            picked: rows to measure; None: none.
            groups: of all lanes, in order, those of policies first; none: rows see everything, as
                a prompt's do.
        """
        parts = [(group, part) for group in groups if (part := rows.part(group.lanes))]
        ends = [
            # The window of a hot set moves on between steps, not from row to row.
            (rows.positions if isinstance(group.chooser, Policy) else rows.starts)[:, part.rows]
            for group, part in parts
        ]
        blocks = self._kv.block_of[:, None]
        size = self._config.window_blocks
        end = window_start(torch.cat(ends, dim=1), size) if ends else rows.starts * 0
        candidates = (blocks >= self._config.sink_blocks) & (blocks < end[..., None])
        lanes = [group.lanes for group, _ in parts if isinstance(group.chooser, Policy)]
        self._round = _Round(
            rows,
            picked,
            parts,
            rows.part(range(lanes[0].start, lanes[-1].stop)) if lanes else None,
            candidates,
            self._kv.after(rows.positions),
            self._counts[rows.lanes],
        )
        self.queries = []

    def attend(self, layer: int, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        """Write new KV and attend; ``AttentionBatch``."""
        now = self._round
        assert now is not None
        rows = now.rows
        queries = torch.unflatten(query, 0, rows.tokens.shape)
        self.queries.append(queries)
        self._kv.write(
            layer, rows.positions, rows.writers, torch.unflatten(kv, 0, rows.tokens.shape)
        )
        logits = self._kv.token_logits(layer, queries, rows.lanes, scale)
        logits.masked_fill_(now.unseen[:, None, :, None], -torch.inf)
        weights = logits
        if now.groups:
            chosen = self._choose(layer, now, queries, logits, scale)
            attended = chosen | ~now.candidates[:, :, None]
            if now.picked is not None:
                self._sums.measure(now.picked, logits, attended, chosen, now.candidates, now.counts)
            hidden = ~by_kv_head(attended, logits.shape[1])
            weights = logits.masked_fill(hidden[..., None], -torch.inf)
        self._remember(layer, rows, queries)
        weights = torch.unflatten(weights.flatten(-2).softmax(-1), -1, logits.shape[-2:])
        return self._kv.weigh(layer, weights, rows.lanes).to(query.dtype).flatten(0, 1)

    def _choose(
        self, layer: int, now: _Round, queries: Tensor, logits: Tensor, scale: float
    ) -> Tensor:
        """Bool ``[Q, N, Hq, C]``, blocks between sink and window that are attended to."""
        rows = now.rows
        chosen = []
        stale = self._stale(layer, rows, queries)
        for group, part in now.groups:
            lanes = rows.lanes[part.rows]
            if isinstance(group.chooser, HotSets):
                mask = group.chooser.mask[layer][:, lanes - group.lanes.start]
                held = mask.repeat_interleave(queries.shape[2] // mask.shape[2], dim=2)
                chosen.append(held)
                continue
            view = LayerView(
                layer, self._kv, queries[:, part.rows], stale[:, part.rows], lanes,
                rows.positions[:, part.rows], now.candidates[:, part.rows],
                now.counts[part.rows], logits[:, :, part.rows], scale,
            )  # fmt: skip
            chosen.append(group.chooser.choose(view))
        every = torch.cat(chosen, dim=1) & now.candidates[:, :, None]
        if now.policies is not None:
            self._sums.move(layer, rows, now.policies, every[:, now.policies.rows])
        return every

    def _stale(self, layer: int, rows: Rows, queries: Tensor) -> Tensor:
        """Query of the token before each row: the row before, or the lane's last one."""
        stale = queries.roll(1, dims=1)
        stale[:, rows.firsts] = self._before[layer][:, rows.running]
        return stale

    def _remember(self, layer: int, rows: Rows, queries: Tensor) -> None:
        """Keep the last query of each lane that computes; of a prompt, every lane keeps it."""
        newest = rows.newest(queries)
        if layer not in self._before:
            self._before[layer] = newest.expand(-1, len(self._counts), -1, -1).clone()
            return
        kept = self._before[layer][:, rows.running]
        some = rows.counts[..., None, None] > 0
        self._before[layer][:, rows.running] = torch.where(some, newest, kept)
