"""``Traffic`` of requests that are tiered at once, and how long transfers ran on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oasiskv.core.traffic import DeviceCounts, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oasiskv.config import OasisConfig
    from oasiskv.core.batch import BatchRequest
    from oasiskv.core.batch_layer import LayerState
    from oasiskv.core.geometry import KVGeometry


class BatchTraffic:
    """Counts what the host knows of each step; the rest the device has counted.

    Args:
        state: what counts on the device.
        geometry: KV sizes of the layers that go sparse.
        config: settings.
    """

    def __init__(self, state: LayerState, geometry: KVGeometry, config: OasisConfig) -> None:
        self._geometry, self._config = geometry, config
        self._device = DeviceCounts(state.counts)
        self._host = Traffic()

    def add_step(self, sparse: Iterable[BatchRequest]) -> None:
        """These have selected; called on the stream on which they did."""
        geometry, config = self._geometry, self._config
        for request in sparse:
            candidates = max(0, request.window_start - config.sink_blocks)
            wanted = min(config.budget_blocks, candidates)
            self._host += Traffic(
                wanted_tiles=wanted * geometry.num_layers * geometry.num_kv_heads,
                cap_bytes=config.cap_blocks * geometry.block_bytes if candidates else 0,
            )
        self._device.request()

    def total(self) -> Traffic:
        """So far; what the device has counted may be some steps old."""
        fetched, missed = self._device.latest()
        tile_bytes = self._geometry.tile_bytes
        return self._host + Traffic(
            missed_tiles=missed, fetched_tiles=fetched, fetched_bytes=fetched * tile_bytes
        )


class OverrunClock:
    """How long transfers run on into the next forward, by the device's clock; none is waited for.

    That is more than a layer waits for its own: what the forward does before it is not taken off.
    """

    def __init__(self) -> None:
        self._end: torch.cuda.Event | None = None
        self._start: torch.cuda.Event | None = None
        self._found: list[float] = []

    def transfers_end(self) -> None:
        """The last transfer of a step is enqueued on the current stream."""
        self._look()
        if self._end is None:
            self._end = _mark()

    def forward_starts(self) -> None:
        """The next forward is about to be enqueued on the current stream."""
        if self._end is not None and self._start is None:
            self._start = _mark()

    def take(self) -> list[float]:
        """Seconds of each step that was measured since the last call."""
        self._look()
        found, self._found = self._found, []
        return found

    def _look(self) -> None:
        if self._end is None or self._start is None:
            return
        if all(mark.query() for mark in (self._end, self._start)):  # type: ignore[no-untyped-call]
            self._found.append(max(0.0, self._start.elapsed_time(self._end) / 1000))
            self._end = self._start = None


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
