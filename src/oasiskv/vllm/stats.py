"""What an engine reports to vLLM each step: counts of its scheduler side and of its workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from oasiskv.core.traffic import Traffic
from oasiskv.metrics.catalog import ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oasiskv.vllm.batch_layers import BatchLayers
    from oasiskv.vllm.layers import SparseLayers
    from oasiskv.vllm.scheduling import SchedulerState

SCHEDULER = "scheduler"

_MIB = 2**20


class Combined(NamedTuple):
    """Stats of all sources of an engine together.

    Attributes:
        counts: by key of the catalogue, what was added.
        gauges: by key, what holds now.
        waits: seconds, one entry per step; the slowest worker's.
    """

    counts: Counter[str]
    gauges: Counter[str]
    waits: list[float]


class OasisStats(KVConnectorStats):
    """Counts, gauges and waits of each source: the scheduler, or one worker.

    ``data`` is ``{source: {"counts": {}, "gauges": {}, "waits": []}}``, of plain values, so that
    it goes from process to process. vLLM puts workers, the scheduler and, for its log line, steps
    together with the same call, and only by the source can one tell which it is.
    """

    @classmethod
    def of(
        cls,
        source: str,
        counts: dict[str, int],
        gauges: dict[str, int],
        waits: Sequence[float] = (),
    ) -> OasisStats:
        """Stats of one source in one step; counts of 0 may be left out."""
        part = {"counts": dict(counts), "gauges": dict(gauges), "waits": list(waits)}
        return cls(data={source: part})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was reported."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> OasisStats:
        """Add ``other``, which is later where it is of the same source."""
        for source, new in other.data.items():
            part = self.data.get(source)
            if part is None:
                self.data[source] = {
                    "counts": dict(new["counts"]),
                    "gauges": dict(new["gauges"]),
                    "waits": list(new["waits"]),
                }
                continue
            for key, count in new["counts"].items():
                part["counts"][key] = part["counts"].get(key, 0) + count
            part["gauges"] |= new["gauges"]
            part["waits"] += new["waits"]
        return self

    def combined(self) -> Combined:
        """All sources together."""
        counts: Counter[str] = Counter()
        gauges: Counter[str] = Counter()
        for part in self.data.values():
            counts.update(part["counts"])
            gauges.update(part["gauges"])
        waits = zip_longest(*(part["waits"] for part in self.data.values()), fillvalue=0.0)
        return Combined(counts, gauges, [max(step) for step in waits])

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line says of an interval."""
        counts, gauges, waits = self.combined()
        line: dict[str, int | float | None] = {
            "sparse requests": gauges["requests.sparse"],
            "dense requests": gauges["requests.dense"],
            "transitions": counts["transitions"],
            "refusals": sum(n for key, n in counts.items() if key.startswith("refusals.")),
        }
        steps = counts["sparse_steps"]
        missed = ratio(counts["missed_tiles"], counts["wanted_tiles"])
        used = gauges["store_blocks.used"]
        store = used + gauges["store_blocks.kept"] + gauges["store_blocks.free"]
        line |= {
            "fetched MiB per step": _rounded(ratio(counts["fetched_bytes"] / _MIB, steps)),
            "cap MiB per step": _rounded(ratio(counts["fetch_cap_bytes"] / _MIB, steps)),
            "hits %": None if missed is None else _rounded(100 * (1 - missed)),
            "wait ms per step": _rounded(ratio(1000 * sum(waits), len(waits))),
            "agreement %": _rounded(
                ratio(100 * counts["agreeing_tiles"], counts["compared_tiles"])
            ),
            "store used %": _rounded(ratio(100 * used, store)),
            "prefix hits %": _rounded(
                ratio(100 * counts["prefix_hit_blocks"], counts["prefix_queried_blocks"])
            ),
        }
        return {name: value for name, value in line.items() if value is not None}


class WorkerMeter:
    """What one worker reports.

    Args:
        models: its sparse layers, of the target and of a draft model.
        rank: of the worker.
    """

    def __init__(self, models: Sequence[SparseLayers | BatchLayers], rank: int) -> None:
        self._models = models
        self._source = f"worker {rank}"
        self._block_bytes = sum(model.geometry.block_bytes for model in models)
        self._reported = Traffic()

    def take(self) -> OasisStats:
        """What has happened since the last call."""
        total = sum((model.traffic() for model in self._models), Traffic())
        counts = asdict(total - self._reported)
        counts["fetch_cap_bytes"] = counts.pop("cap_bytes")
        self._reported = total
        # Models wait one after the other.
        waits = zip_longest(*(model.take_waits() for model in self._models), fillvalue=0.0)
        gauges = {"block_bytes": self._block_bytes}
        return OasisStats.of(self._source, counts, gauges, [sum(step) for step in waits])


def scheduler_stats(state: SchedulerState, sink_blocks: int, block_tokens: int) -> OasisStats:
    """What the scheduler side reports of a step; what it counted starts anew.

    Args:
        state: of the requests and the store.
        sink_blocks: blocks of the sink.
        block_tokens: tokens of a block.
    """
    gauges = dict.fromkeys((f"{key}.{kind}" for key in _BY_KIND for kind in ("dense", "sparse")), 0)
    for request in state.admitted.values():
        kind = "sparse" if request.window_start else "dense"
        context = -(-request.request.num_computed_tokens // block_tokens)
        gone = max(0, request.window_start - sink_blocks)
        gauges[f"requests.{kind}"] += 1
        gauges[f"context_blocks.{kind}"] += context
        gauges[f"resident_blocks.{kind}"] += max(0, context - gone) + len(request.hot)
    if state.store is not None:
        kept, available = state.store.kept_blocks, state.store.free_blocks
        gauges["store_blocks.used"] = state.store.capacity_blocks - available
        gauges["store_blocks.kept"] = kept
        gauges["store_blocks.free"] = available - kept
        gauges["store_promised_blocks"] = state.promised
    counts = dict(state.counts)
    state.counts.clear()
    return OasisStats.of(SCHEDULER, counts, gauges)


_BY_KIND = ("requests", "context_blocks", "resident_blocks")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def build_stats(data: dict[str, Any] | None) -> OasisStats:
    """Stats from the ``data`` of others."""
    return OasisStats(data=data if data is not None else {})
