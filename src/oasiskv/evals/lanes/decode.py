"""Decode questions with many settings at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oasiskv.config import BLOCK_TOKENS
from oasiskv.core.tiering import LATEST_QUERIES
from oasiskv.drafts.base import DraftSource
from oasiskv.drafts.lookahead import lookahead_row
from oasiskv.evals.lanes.asked import Asked, Decoded
from oasiskv.evals.lanes.attention import LaneAttention
from oasiskv.evals.lanes.compare import Comparison, Gained
from oasiskv.evals.lanes.hot_sets import HotSets
from oasiskv.evals.lanes.kv import LaneKV
from oasiskv.evals.lanes.rows import Rows, Segment, lay_out, window_start
from oasiskv.evals.lanes.setup import (
    check_prompts,
    drafts_of,
    hot_lanes,
    in_order,
    lanes_of,
    track_of,
)
from oasiskv.evals.lanes.shared import SharedDrafts
from oasiskv.evals.lanes.sums import Picked, Sums
from oasiskv.evals.methods import DENSE, Setting
from oasiskv.hf.loading import LoadedModel
from oasiskv.ops.score.reference import block_scores

MEASURE_EVERY = 16
"""Recall and mass are measured of every so many tokens of a policy, and steps of OasisKV."""
AGREEMENT_EVERY = 8
"""Steps between two in which prediction agreement is measured."""


class LaneDecoder:
    """Decodes all questions with all settings, round by round: one step of every lane each.

    Rows of different lanes never see one another; what a lane gives does not depend on what else
    is decoded beside it.

    Args:
        loaded: a model with full attention in all layers.
        asked: questions; their prompts must be longer than the hot sets, or nothing is sparse.
        settings: what to decode with; sink and window are those of the first one.
        seed: of what is random in methods.
        keep_log_probs: ``Decoded.log_probs`` is wanted.
        assistant: drafts of another model.

    Attributes:
        settings: those given, in the order of lanes.
        hot_sets: lanes of OasisKV at one budget, and their hot sets.
        tracks: ``[Q][M]``.
        block_of: int64 ``[Q, C]``, number of each block of a mask in its question.

    Raises:
        PromptError: a prompt is too short.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        asked: Sequence[Asked],
        settings: Sequence[Setting],
        seed: int = 0,
        keep_log_probs: bool = False,
        assistant: DraftSource | None = None,
    ) -> None:
        self._loaded, self._asked = loaded, asked
        self._geometry, self._device = loaded.geometry, loaded.device
        self.settings = in_order(settings)
        config = self.settings[0].config
        self._window, self._sinks = config.window_blocks, config.sink_blocks
        check_prompts(asked, self.settings)
        lanes = len(self.settings)
        shared = None
        if assistant is not None:
            prompts = {each.name: len(each.prompt) for each in asked}
            shared = SharedDrafts(assistant, prompts, config.draft_tokens)
        who = lanes_of(self.settings, seed, self._device)
        self._hot = who.hot
        self._sources = [drafts_of(each, asked, shared, who.all_dense) for each in self.settings]
        self.tracks = [[track_of(one, each) for each in self.settings] for one in asked]
        self._steps = [[0] * lanes for _ in asked]
        self._rounds = 0
        self._comparison = Comparison(asked, lanes, keep_log_probs)
        tail = max(len(each.prompt) - len(each.prefilled.tokens) + each.limit for each in asked)
        drafts = max(track.most_drafts for track in self.tracks[0])
        self._kv = LaneKV(
            loaded.geometry, [each.prefilled for each in asked], lanes, tail + drafts, self._device
        )
        self.block_of = self._kv.block_of
        self._sums = Sums(loaded.geometry, self.block_of.shape, lanes, self._device)
        self._attention = LaneAttention(self._kv, config, who, self._sums)
        self.hot_sets = self._decode_prompts()
        self._hold()

    def run(self) -> list[dict[Setting, Decoded]]:
        """Decode to the end; of each question, what each setting gave."""
        while self.round():
            pass
        return self.results()

    @torch.no_grad()
    def round(self) -> bool:
        """One step of every lane that has not ended; False if all have."""
        segments = [
            [track.propose(source) for track, source in zip(own, self._sources, strict=True)]
            for own in self.tracks
        ]
        if not any(segment.tokens for own in segments for segment in own):
            return False
        self._rounds += 1
        rows = lay_out(segments, self._kv.spare, self._device)
        picked = self._pick(rows)
        self._attention.begin(rows, picked)
        logits = self._forward(rows)
        closed = [[track.computed // BLOCK_TOKENS for track in own] for own in self.tracks]
        accepted, kept = self._accept(rows, segments, logits)
        self._kv.close(
            [
                (q, lane, block)
                for q, own in enumerate(self.tracks)
                for lane, track in enumerate(own)
                for block in range(closed[q][lane], track.computed // BLOCK_TOKENS)
            ]
        )
        if picked is not None:
            self._sums.settle(rows, picked, kept)
        self._select(rows, segments, accepted)
        return True

    @torch.no_grad()
    def _decode_prompts(self) -> list[tuple[range, HotSets]]:
        """The last tokens of all prompts, densely, in lane 0; and what they make hot."""
        given = [
            Segment(each.prompt[-LATEST_QUERIES:], len(each.prompt) - LATEST_QUERIES)
            for each in self._asked
        ]
        rows = lay_out([[segment] for segment in given], self._kv.spare, self._device)
        self._attention.begin(rows, prompt=True)
        logits = self._forward(rows)
        self._kv.share_tail()
        gained = []
        best = logits[:, -1].argmax(-1).tolist()
        for q, own in enumerate(self.tracks):
            for lane, track in enumerate(own):
                [token] = track.accept(best[q : q + 1])
                gained.append(Gained(q, lane, len(rows.lanes) - 1, 0, token))
        self._comparison.take(logits, gained)
        first = self._kv.first_tail.tolist()
        self._kv.close(
            [
                (q, lane, block)
                for q, each in enumerate(self._asked)
                for lane in range(len(self.settings))
                for block in range(first[q], len(each.prompt) // BLOCK_TOKENS)
            ]
        )
        if not self._hot:
            return []
        ends = torch.tensor([len(each.prompt) for each in self._asked], device=self._device)
        candidates = self._candidates(ends)
        every = candidates[:, None].expand(-1, len(rows.lanes), -1)
        scores = self._scores(torch.stack(self._attention.queries), rows.lanes, every).mean(2)
        return [
            (own, HotSets(self.settings[own.start].config, scores, candidates, len(own)))
            for own in hot_lanes(self.settings)
        ]

    def _forward(self, rows: Rows) -> Tensor:
        """Logits of all rows, float32 ``[Q, N, vocabulary]``."""
        logits = self._loaded.model(
            input_ids=rows.tokens.reshape(1, -1),
            position_ids=rows.positions.reshape(1, -1),
            use_cache=False,
            oasis_batch=self._attention,
        ).logits[0]
        self._attention.finish()
        return torch.unflatten(torch.as_tensor(logits).float(), 0, rows.tokens.shape)

    def _accept(
        self, rows: Rows, segments: list[list[Segment]], logits: Tensor
    ) -> tuple[list[list[list[int]]], Tensor]:
        """Tokens that each question and lane gains; rows ``[Q, N]`` that were no rejected draft."""
        best = logits.argmax(-1).tolist()
        accepted: list[list[list[int]]] = [[[] for _ in own] for own in self.tracks]
        gained = []
        for q, own in enumerate(self.tracks):
            for each in rows.by_lane:
                if not segments[q][each.lane].tokens:
                    continue
                track = own[each.lane]
                start = track.decoded
                tokens = track.accept(best[q][each.first : each.first + each.width])
                accepted[q][each.lane] = tokens
                self._steps[q][each.lane] += 1
                gained += [
                    Gained(q, each.lane, each.first + i, start + i, token)
                    for i, token in enumerate(tokens)
                ]
        self._comparison.take(logits, gained)
        kept = torch.zeros_like(rows.valid)
        at = torch.tensor([(each.question, each.row) for each in gained], device=self._device)
        kept[at[:, 0], at[:, 1]] = True
        return accepted, kept

    def _pick(self, rows: Rows) -> Picked | None:
        """Rows to measure."""
        due = (self._rounds - 1) % MEASURE_EVERY == 0
        positions, valid = rows.positions.tolist(), rows.valid.tolist()
        found = [
            (q, row)
            for each in rows.by_lane
            if self.settings[each.lane].method.name != DENSE
            for row in range(each.first, each.first + each.width)
            for q in range(len(positions))
            if valid[q][row]
            and (due if each.lane in self._hot else positions[q][row] % MEASURE_EVERY == 0)
        ]
        return Picked(*torch.tensor(found, device=self._device).T) if found else None

    def _select(
        self, rows: Rows, segments: list[list[Segment]], accepted: list[list[list[int]]]
    ) -> None:
        """What hot sets do between two steps."""
        firsts = {each.lane: each.first for each in rows.by_lane if each.lane in self._hot}
        if not firsts:
            return
        running = list(firsts)
        active = torch.tensor(
            [[bool(own[lane].tokens) for lane in running] for own in segments], device=self._device
        )
        own_rows = [list(firsts.values()) for _ in self._asked]
        look = [list(each) for each in own_rows]
        for q, tracks in enumerate(self.tracks):
            for i, lane in enumerate(running):
                if accepted[q][lane]:
                    track = tracks[lane]
                    look[q][i] += lookahead_row(track.mode, track.drafts, accepted[q][lane])
        ends = torch.tensor(
            [[own[lane].computed for lane in running] for own in self.tracks], device=self._device
        )
        candidates = self._candidates(ends)
        queries = torch.stack(self._attention.queries)
        compare = self._rounds > 1 and (self._rounds - 2) % AGREEMENT_EVERY == 0
        for_own = self._at(queries, own_rows) if compare else None
        lanes = torch.tensor(running, device=self._device)
        scores = self._scores(self._at(queries, look), lanes, candidates)
        for own, hot_sets in self.hot_sets:
            places = [i for i, lane in enumerate(running) if lane in own]
            if not places:
                continue
            part = slice(places[0], places[-1] + 1)
            within = lanes[part] - own.start
            if for_own is not None:
                before = hot_sets.candidates(within)
                own_scores = self._scores(for_own[:, :, part], lanes[part], before)
                hot_sets.compare(within, own_scores, active[:, part])
            hot_sets.step(
                within, scores[:, :, part], candidates[:, part], active[:, part], self._rounds
            )
        self._hold()

    def _hold(self) -> None:
        """Show attention what is in slots now."""
        if self.hot_sets:
            masks = [hot_sets.mask for _, hot_sets in self.hot_sets]
            self._attention.held = torch.cat(masks, dim=2)

    def _at(self, queries: Tensor, rows: list[list[int]]) -> Tensor:
        """Queries ``[L, Q, n, Hq, D]`` of rows ``[Q][n]``."""
        questions = torch.arange(queries.shape[1], device=self._device)[:, None]
        return queries[:, questions, torch.tensor(rows, device=self._device)]

    def _candidates(self, ends: Tensor) -> Tensor:
        """Blocks between sink and window after ``ends``, int64 ``[Q, ...]``, computed tokens."""
        blocks = self.block_of.reshape(len(ends), *[1] * (ends.dim() - 1), -1)
        end = window_start(ends, self._window)[..., None]
        return (blocks >= self._sinks) & (blocks < end)

    def _scores(self, queries: Tensor, lanes: Tensor, candidates: Tensor) -> Tensor:
        """Expected share of attention of each block, as ``core.selection.Selector`` has it.

        Args:
            queries: ``[L, Q, n, Hq, D]``.
            lanes: int64 ``[n]``.
            candidates: bool ``[Q, n, C]``.

        Returns:
            ``[L, Q, n, H, C]``.
        """
        scale = self._geometry.head_dim**-0.5
        logits = torch.stack(
            [self._kv.keys4_logits(layer, own, lanes, scale) for layer, own in enumerate(queries)]
        )
        allowed = candidates.expand(len(queries), *candidates.shape).flatten(0, 2)
        scores = block_scores(logits.flatten(0, 2)[:, None], allowed, self._geometry.num_kv_heads)
        return torch.unflatten(scores, 0, logits.shape[:3])

    def results(self) -> list[dict[Setting, Decoded]]:
        """Of each question, what each setting gave."""
        self._comparison.end()
        tile = self._geometry.tile_bytes
        results = []
        for q, (own, asked) in enumerate(zip(self._comparison.found, self._asked, strict=True)):
            for lane, found in enumerate(own):
                start = len(asked.prompt) + len(asked.forced)
                found.tokens = self.tracks[q][lane].tokens[start:]
                found.mass, found.recall = self._sums.means(q, lane)
                if self.settings[lane].method.name != DENSE:
                    moved, rows = self._sums.moves(q, lane)
                    found.moved_bytes = moved * tile / max(1, rows)
            for lanes, hot_sets in self.hot_sets:
                for lane in lanes:
                    found, i = own[lane], lane - lanes.start
                    steps = max(1, self._steps[q][lane])
                    found.moved_bytes = int(hot_sets.fetched[q, i]) * tile / steps
                    agreement = float(hot_sets.agreement[q, i])
                    found.agreement = None if agreement != agreement else agreement
                    wanted = int(hot_sets.wanted[q, i])
                    found.misses = int(hot_sets.missed[q, i]) / wanted if wanted else None
            results.append(dict(zip(self.settings, own, strict=True)))
        return results
