"""The catalogue's metrics in vLLM's Prometheus registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from oasiskv.metrics.catalog import METRICS, WAIT_BUCKETS_S, Metric
from oasiskv.vllm.stats import build_stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OasisPromMetrics(KVConnectorPromMetrics):
    """Registers every metric of the catalogue, for each engine, and sets it from ``OasisStats``.

    Args:
        vllm_config: vLLM's configuration.
        metric_types: what stands for Prometheus' gauge, counter and histogram.
        labelnames: vLLM's labels.
        per_engine_labelvalues: engine -> their values.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # By engine and by key of the stats.
        self._metrics: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for metric in METRICS:
            whole = self._make(metric, labelnames)
            for engine, own in per_engine_labelvalues.items():
                for value, key in metric.keys.items():
                    labels = [*own, value] if metric.label else own
                    self._metrics[engine][key] = whole.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what one step of an engine reported."""
        metrics = self._metrics[engine_idx]
        counts, gauges, waits = build_stats(transfer_stats_data).combined()
        for key, count in counts.items():
            metrics[key].inc(count)
        for key, value in gauges.items():
            metrics[key].set(value)
        for wait in waits:
            metrics["transfer_wait_seconds"].observe(wait)

    def _make(self, metric: Metric, labelnames: list[str]) -> Any:  # noqa: ANN401
        labels = [*labelnames, metric.label] if metric.label else labelnames
        common = {"name": metric.name, "documentation": metric.meaning, "labelnames": labels}
        if metric.kind == "counter":
            return self._counter_cls(**common)
        if metric.kind == "gauge":
            # Of several front-ends the one that heard of the engine last knows.
            return self._gauge_cls(**common, multiprocess_mode="mostrecent")
        return self._histogram_cls(**common, buckets=list(WAIT_BUCKETS_S))
