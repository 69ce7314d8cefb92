"""What the state of requests that are tiered at once is sized by."""

from __future__ import annotations

from typing import NamedTuple

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.tiering import LATEST_QUERIES

_FEW_PAIRS = 128
"""Least number of blocks that a graph of a step takes as closing, or leaving the window. Wider ones
are for twice as many, and so on, up to the most that a step can bring."""

_FEW_ROWS = 16
"""Least number of rows that a graph looks at; four times as many, and so on, up to all."""


class BatchLimits(NamedTuple):
    """What the state of a batch is sized by.

    Attributes:
        max_requests: most requests at once.
        max_tokens: longest request.
        max_drafts: most drafts of a request in one step.
        step_tokens: most tokens of a step, of all requests.
    """

    max_requests: int
    max_tokens: int
    max_drafts: int
    step_tokens: int

    @property
    def ring_tokens(self) -> int:
        """Queries kept of each request: the latest ones survive rejected drafts."""
        return LATEST_QUERIES + self.max_drafts

    def widths(self, block_tokens: int) -> list[int]:
        """Numbers of blocks that graphs are captured for."""
        most = self.step_tokens // block_tokens + self.max_requests
        widths = [_FEW_PAIRS]
        while widths[-1] < most:
            widths.append(2 * widths[-1])
        return widths

    def row_counts(self) -> list[int]:
        """Numbers of rows that graphs are captured for: programs of empty rows take time too."""
        counts = [_FEW_ROWS]
        while counts[-1] < self.max_requests:
            counts.append(4 * counts[-1])
        return [*counts[:-1], self.max_requests]

    def state_bytes(self, geometry: KVGeometry, config: OasisConfig) -> int:
        """Bytes of the state on the device, digests apart."""
        query = geometry.num_query_heads * geometry.head_dim * geometry.dtype.itemsize
        ring = (self.max_requests + 1) * self.ring_tokens * query
        maps = 2 * geometry.num_kv_heads * config.hot_blocks
        own = geometry.blocks_for(self.max_tokens) + config.hot_blocks
        layers = geometry.num_layers * (ring + 4 * self.max_requests * maps)
        return layers + 4 * self.max_requests * own

    def scratch_bytes(self, geometry: KVGeometry) -> int:
        """Bytes that a layer works in, on the device: logits and scores of all requests."""
        rows = max(self.max_requests, LATEST_QUERIES)
        heads = geometry.num_query_heads + geometry.num_kv_heads
        return 4 * rows * heads * geometry.blocks_for(self.max_tokens)
