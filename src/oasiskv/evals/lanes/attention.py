"""Attention of all lanes' rows in one forward: everything is there, a mask says what is seen."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from oasiskv.config import OasisConfig
from oasiskv.evals.lanes.kv import LaneKV, by_kv_head
from oasiskv.evals.lanes.rows import Part, Rows, window_start
from oasiskv.evals.lanes.sums import Picked, Sums
from oasiskv.evals.policies import Dense, LayerView, Policy, choose


@dataclass(frozen=True)
class Lanes:
    """Who decodes in which lane.

    Args:
        policies: neighbouring lanes and the policy that chooses for them, in order.
        hot: OasisKV's lanes, after all others.
        counts: int64 ``[M]``, blocks that each lane may choose.
    """

    policies: list[tuple[range, Policy]]
    hot: range
    counts: Tensor

    @property
    def all_dense(self) -> bool:
        """No lane leaves anything out."""
        return not self.hot and all(isinstance(policy, Dense) for _, policy in self.policies)


@dataclass
class _Round:
    """What is the same in all layers.

    Args:
        rows: what is computed.
        picked: rows to measure.
        prompt: the rows are of prompts.
        everything: rows see everything, as a prompt's do.
        policies: those whose lanes compute, and their rows.
        chosen: the rows of all policies.
        hot: the rows of hot lanes.
        held: int64, which hot lane each of them is of.
        candidates: bool ``[Q, N, C]``, blocks between sink and window.
        always: bool ``[Q, N, C]``, blocks that are attended to anyway.
        counts: int64 ``[N]``, blocks that a row may choose.
    """

    rows: Rows
    picked: Picked | None
    prompt: bool
    everything: bool
    policies: list[tuple[Policy, Part]]
    chosen: Part | None
    hot: Part | None
    held: Tensor
    candidates: Tensor
    always: Tensor
    counts: Tensor


class LaneAttention:
    """Implements ``AttentionBatch`` for all rows of a round.

    Args:
        kv: keys and values.
        config: sizes of sink and window.
        lanes: who decodes in which lane.
        sums: takes measurements.

    Attributes:
        queries: of the last forward, one ``[Q, N, Hq, D]`` a layer.
        held: bool ``[L, Q, hot lanes, H, C]``, blocks in slots.
    """

    def __init__(self, kv: LaneKV, config: OasisConfig, lanes: Lanes, sums: Sums) -> None:
        self._kv, self._config, self._lanes, self._sums = kv, config, lanes, sums
        self._round: _Round | None = None
        self._before = torch.zeros(0)
        self.queries: list[Tensor] = []
        self.held = torch.zeros(0)

    def begin(self, rows: Rows, picked: Picked | None = None, prompt: bool = False) -> None:
        """The next forward.

        Args:
            rows: what it computes.
            picked: rows to measure; None: none.
            prompt: the rows are of prompts, in lane 0.
        """
        lanes = self._lanes
        policies = [(p, part) for own, p in lanes.policies if (part := rows.part(own))]
        hot = rows.part(lanes.hot)
        # The window of a hot set moves on between steps, not from row to row.
        ends = rows.positions.clone()
        if hot is not None:
            ends[:, hot.rows] = rows.starts[:, hot.rows]
        end = window_start(ends, self._config.window_blocks)
        blocks = self._kv.block_of[:, None]
        candidates = (blocks >= self._config.sink_blocks) & (blocks < end[..., None])
        self._round = _Round(
            rows,
            picked,
            prompt,
            prompt or lanes.all_dense,
            policies,
            rows.part(range(lanes.hot.start)),
            hot,
            rows.lanes[hot.rows] - lanes.hot.start if hot is not None else rows.lanes[:0],
            candidates,
            ~candidates & self._kv.real[:, None],
            lanes.counts[rows.lanes],
        )
        self.queries = []

    def finish(self) -> None:
        """The forward is done: keep the last query of each policy's lane, and count moves.

        Of a prompt every lane keeps the last one.
        """
        now = self._round
        assert now is not None
        if now.prompt:
            last = torch.stack([queries[:, -1:] for queries in self.queries])
            self._before = last.repeat(1, 1, len(self._lanes.counts), 1, 1)
        elif now.chosen is not None and not now.everything:
            own = torch.stack([queries[:, now.chosen.rows] for queries in self.queries])
            running = now.rows.running[now.chosen.running]
            kept = self._before[:, :, running]
            self._before[:, :, running] = now.rows.newest(own, kept, now.chosen)
            self._sums.settle_moves(now.rows, now.chosen)

    def attend(self, layer: int, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        """Write new KV and attend; ``AttentionBatch``."""
        now = self._round
        assert now is not None
        shape = now.rows.tokens.shape
        queries = torch.unflatten(query, 0, shape)
        self.queries.append(queries)
        self._kv.write(layer, now.rows, torch.unflatten(kv, 0, shape))
        mask = partial(self._mask, layer, now, queries, scale)
        out = self._kv.attend(layer, queries, now.rows, scale, mask)
        return out.to(query.dtype).flatten(0, 1)

    def _mask(
        self, layer: int, now: _Round, queries: Tensor, scale: float, logits: Tensor
    ) -> Tensor:
        """Token logits with -inf for what is not attended to."""
        if now.everything:
            hidden = ~self._kv.real[:, None, None, None, :, None]
            return logits.masked_fill_(hidden, -torch.inf)
        chosen = self._choose(layer, now, queries, scale, logits) & now.candidates[:, :, None]
        if now.chosen is not None:
            self._sums.move(chosen[:, now.chosen.rows])
        attended = chosen | now.always[:, :, None]
        if now.picked is not None:
            self._sums.measure(
                now.picked, logits, self._kv.real, attended, chosen, now.candidates, now.counts
            )
        hidden = ~by_kv_head(attended, logits.shape[1])
        return logits.masked_fill_(hidden[..., None], -torch.inf)

    def _choose(
        self, layer: int, now: _Round, queries: Tensor, scale: float, logits: Tensor
    ) -> Tensor:
        """Bool ``[Q, N, Hq, C]``; blocks that are no candidates are not looked at."""
        rows, parts = now.rows, []
        if now.policies:
            stale = self._stale(layer, now, queries)
            views = [
                LayerView(
                    layer,
                    self._kv,
                    queries[:, part.rows],
                    stale[:, part.rows],
                    rows.lanes[part.rows],
                    rows.positions[:, part.rows],
                    now.candidates[:, part.rows],
                    now.counts[part.rows],
                    logits[:, :, part.rows],
                    scale,
                )
                for _, part in now.policies
            ]
            policies = [policy for policy, _ in now.policies]
            parts.append(choose(policies, views))
        if now.hot is not None:
            held = self.held[layer][:, now.held]
            parts.append(held.repeat_interleave(queries.shape[2] // held.shape[2], dim=2))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _stale(self, layer: int, now: _Round, queries: Tensor) -> Tensor:
        """Query of the token before each row: the row before, or the lane's last one."""
        stale = queries.roll(1, dims=1)
        stale[:, now.rows.firsts] = self._before[layer][:, now.rows.running]
        return stale
