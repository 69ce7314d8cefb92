"""Decoding with any selection: all KV in one place, and a mask over it.

Every row of a forward attends to the sink, the blocks chosen for it and its window, so that many
known tokens are decoded in one forward and give what decoding them one by one would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oasiskv.config import OasisConfig
from oasiskv.core.selection import top_blocks
from oasiskv.evals.policies import LayerView, Policy
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled

ROWS = 64
"""Rows that attend at once; bounds memory."""


@dataclass
class Sums:
    """Measurements of a run, over its rows.

    Attributes:
        rows: rows measured.
        recall: ``[layers, KV heads]`` share of the best blocks by true attention that were attended
            to, summed over rows.
        mass: ``[layers, KV heads]`` share of the true attention that was covered, likewise.
        moved_tiles: tiles chosen that were not chosen for the row before.
        moved_rows: rows that have one before them.
    """

    rows: int = 0
    recall: Tensor = field(default_factory=lambda: torch.zeros(0))
    mass: Tensor = field(default_factory=lambda: torch.zeros(0))
    moved_tiles: int = 0
    moved_rows: int = 0


class MaskedDecoder:
    """One request.

    Args:
        loaded: a model with full attention in all layers.
        prefilled: KV of the prompt's first tokens.
        policy: what is attended to.
        config: sizes of sink and window.
        tokens: most tokens that will be there.
        measure_every: rows between two of which recall and mass are measured; 0: none.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefilled: Prefilled,
        policy: Policy,
        config: OasisConfig,
        tokens: int,
        measure_every: int = 0,
    ) -> None:
        geometry = loaded.geometry
        self._loaded, self._policy, self._config = loaded, policy, config
        self._measure_every = measure_every
        self._size = geometry.block_tokens
        blocks = geometry.blocks_for(tokens)
        shape = (geometry.num_layers, blocks, geometry.num_kv_heads, *geometry.tile_shape)
        self._kv = torch.zeros(shape, dtype=geometry.dtype, device=loaded.device)
        for own, other in zip(self._kv, prefilled.layers, strict=True):
            own[: other.shape[0]] = other[:blocks]
        self.computed = len(prefilled.tokens)
        # What lies beyond is not written yet, and 0 times NaN is NaN.
        self._kv[:, self.computed // self._size, :, self.computed % self._size :] = 0
        self._kv[:, self.computed // self._size + 1 :] = 0
        heads = (geometry.num_query_heads, geometry.head_dim)
        self._before = self._kv.new_zeros((geometry.num_layers, 1, *heads))
        self._last_chosen: dict[int, Tensor] = {}
        self._dense = True
        stats = (geometry.num_layers, geometry.num_kv_heads)
        self.sums = Sums(recall=torch.zeros(stats), mass=torch.zeros(stats))

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], dense: bool = False) -> Tensor:
        """Decode known tokens.

        Args:
            tokens: the next token ids.
            dense: they attend to everything, as the prompt's do.

        Returns:
            Logits ``[tokens, vocabulary]``, float32, on the CPU.
        """
        self._dense = dense
        device, start = self._loaded.device, self.computed
        positions = torch.arange(start, start + len(tokens), device=device)
        logits = self._loaded.model(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=positions[None],
            use_cache=False,
            oasis_batch=self,
        ).logits[0]
        self.computed += len(tokens)
        if not dense:
            self.sums.rows += len(self._measured(start, self.computed))
        return torch.as_tensor(logits).float().cpu()

    def attend(self, layer: int, query: Tensor, kv: Tensor, scale: float) -> Tensor:
        """Write new KV and attend; ``AttentionBatch``."""
        start, end = self.computed, self.computed + len(query)
        positions = torch.arange(start, end, device=query.device)
        self._kv[layer][positions // self._size, :, positions % self._size] = kv
        stale = torch.cat((self._before[layer], query[:-1]))
        self._before[layer] = query[-1:]
        pieces = range(0, len(query), ROWS)
        return torch.cat(
            [
                self._attend_rows(
                    layer, positions[i : i + ROWS], query[i : i + ROWS], stale[i : i + ROWS], scale
                )
                for i in pieces
            ]
        )

    def _attend_rows(
        self, layer: int, positions: Tensor, query: Tensor, stale: Tensor, scale: float
    ) -> Tensor:
        first, last = int(positions[0]), int(positions[-1])
        end = last // self._size + 1
        tiles = self._kv[layer][:end]
        blocks = torch.arange(end, device=query.device)
        tokens = torch.arange(end * self._size, device=query.device)
        causal = tokens <= positions[:, None]
        group = query.shape[1] // tiles.shape[1]
        keys, values = tiles.transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
        logits = torch.einsum(
            "rhgd,htd->rhgt", _by_kv_head(query, group).float() * scale, keys.float()
        ).masked_fill(~causal[:, None, None], -torch.inf)
        allowed = causal[:, None, None]
        if not self._dense:
            window = (positions // self._size - self._config.window_blocks).clamp(min=0)
            between = (blocks >= self._config.sink_blocks) & (blocks < window[:, None])
            view = LayerView(layer, query, stale, tiles, between, scale, first)
            chosen = self._policy.choose(view) & between[:, None]
            attended = (chosen | ~between[:, None]).repeat_interleave(self._size, dim=-1)
            allowed = _by_kv_head(attended, group) & causal[:, None, None]
            self._measure(view, chosen, logits, allowed)
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        out = torch.einsum("rhgt,htd->rhgd", weights, values.float())
        return out.flatten(1, 2).to(query.dtype)

    def _measured(self, first: int, end: int) -> list[int]:
        """Positions among ``first..end-1`` that are measured."""
        every = self._measure_every
        return [] if not every else [at for at in range(first, end) if at % every == 0]

    def _measure(self, view: LayerView, chosen: Tensor, logits: Tensor, allowed: Tensor) -> None:
        by_kv_head = _by_kv_head(chosen, view.group).any(2)
        self._count_moves(view.layer, by_kv_head)
        first = view.first_position
        rows = [at - first for at in self._measured(first, first + len(chosen))]
        if not rows:
            return
        weights = logits[rows].softmax(-1)
        covered = (weights * allowed[rows]).sum(-1).mean(-1)
        self.sums.mass[view.layer] += covered.sum(0).cpu()
        between = view.candidates[rows]
        inside = (
            weights.reshape(*weights.shape[:-1], -1, self._size).sum(-1) * between[:, None, None]
        )
        # As scores are: of each query head the share of what it gives to candidates.
        shares = (inside / inside.sum(-1, keepdim=True).clamp(min=1e-30)).mean(2)
        ideal = top_blocks(shares.masked_fill(~between[:, None], -1), self._slots(view))
        ideal &= between[:, None]
        found = (ideal & by_kv_head[rows]).sum(-1) / ideal.sum(-1).clamp(min=1)
        self.sums.recall[view.layer] += torch.where(ideal.any(-1), found, 1.0).sum(0).cpu()

    def _slots(self, view: LayerView) -> int:
        return min(self._config.hot_blocks, view.candidates.shape[-1])

    def _count_moves(self, layer: int, chosen: Tensor) -> None:
        """What a fast tier of exactly the chosen tiles would have to fetch, row after row."""
        before = self._last_chosen.get(layer)
        rows = chosen
        if before is not None:
            missing = chosen.shape[-1] - before.shape[-1]
            rows = torch.cat((torch.nn.functional.pad(before, (0, missing)), chosen))
        self.sums.moved_tiles += int((rows[1:] & ~rows[:-1]).sum())
        if layer == 0:
            self.sums.moved_rows += len(rows) - 1
        self._last_chosen[layer] = chosen[-1:]


def _by_kv_head(rows: Tensor, group: int) -> Tensor:
    """``[rows, query heads, ...]`` -> ``[rows, KV heads, group, ...]``."""
    return rows.reshape(rows.shape[0], -1, group, *rows.shape[2:])
