"""The attention of one step: who computes which tokens, and whose queries are kept."""

from dataclasses import dataclass

import torch

from oasiskv.hf.request import Phase, Request
from oasiskv.ops.attend.reference import attend


@dataclass
class Segment:
    """Tokens of one request in a step.

    Attributes:
        request: the request.
        start: position of the first token.
        tokens: token ids to compute.
        drafts: how many of them, the last ones, are drafts.
        keep: queries to keep, of the last tokens.
        queries: kept queries per full-attention layer, ``[keep, query heads, head_dim]`` each,
            filled by the forward.
    """

    request: Request
    start: int
    tokens: list[int]
    drafts: list[int]
    keep: int
    queries: list[torch.Tensor]

    @property
    def is_prefill(self) -> bool:
        """The tokens are of the prompt."""
        return self.request.phase is Phase.PREFILL

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)

    def kept_queries(self) -> torch.Tensor:
        """``[full layers, keep, query heads, head_dim]``."""
        return torch.stack(self.queries)


class StepBatch:
    """Implements ``AttentionBatch`` for one forward.

    Args:
        segments: in the order in which their tokens are packed.
        sliding_windows: per model layer its sliding window, or None.
        step: number of the step.
    """

    def __init__(
        self, segments: list[Segment], sliding_windows: tuple[int | None, ...], step: int
    ) -> None:
        self.segments = segments
        self._sliding = sliding_windows
        self._step = step
        self._full_index = {
            layer: index
            for index, layer in enumerate(
                i for i, window in enumerate(sliding_windows) if window is None
            )
        }

    def attend(
        self, layer: int, query: torch.Tensor, kv: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write each segment's KV, then attend over what the request holds in the fast tier."""
        sizes = [len(segment.tokens) for segment in self.segments]
        rows = zip(self.segments, torch.split(query, sizes), torch.split(kv, sizes), strict=True)
        return torch.cat([self._attend_one(layer, *row, scale) for row in rows])

    def _attend_one(
        self, layer: int, segment: Segment, query: torch.Tensor, kv: torch.Tensor, scale: float
    ) -> torch.Tensor:
        request = segment.request
        filled = 0
        if layer in self._full_index:
            if segment.keep:
                segment.queries.append(query[-segment.keep :].detach().clone())
            if request.pipeline is not None and request.residents is not None:
                request.pipeline.consume(self._full_index[layer], self._step)
                filled = request.residents.filled
        request.kv.write(layer, segment.start, kv)
        table, kv_tokens = request.kv.table(layer, segment.start, segment.end, filled)
        return attend(
            query, request.kv.layers[layer], table, kv_tokens, scale, self._sliding[layer]
        )
