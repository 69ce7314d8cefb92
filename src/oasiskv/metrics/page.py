"""The metrics page of the docs, from the catalogue: ``python -m oasiskv.metrics.page``."""

import sys

from oasiskv.metrics.catalog import METRICS, PREFIX, Metric

HEAD = f"""# Metrics

<!-- Made by `python -m oasiskv.metrics.page > docs/metrics.md`; see src/oasiskv/metrics. -->

Under OasisKV vLLM's own `/metrics` has these too, with vLLM's labels `model_name` and `engine`.
Names start with `{PREFIX}`: vLLM looks after metrics with its own prefix, and no others. Counters
and bytes are sums over the workers of an engine; of waiting, the slowest worker counts. Words are
those of [architecture.md](architecture.md).

```
oasiskv top                        # the same at a terminal: http://127.0.0.1:8000, or a URL
curl -s localhost:8000/metrics | grep oasiskv
```

![oasiskv top](images/top.svg)

A dashboard for Grafana, with how to start it, is in [grafana/](grafana/README.md). vLLM's log line
(`KV Transfer metrics:`, every 10 seconds while requests run) sums the same up: sparse and dense
requests, bytes fetched per step with their cap, hits, waiting, agreement, and the store.

vLLM's `--disable-log-stats` takes them out with its own. Nothing is waited for to read them: on
CUDA what is counted on the device is a step or two old, and what the last steps before a pause did
is seen with the next one.

| metric | type | unit | meaning | what it tells |
| --- | --- | --- | --- | --- |
"""


def metrics_page() -> str:
    """The page as Markdown: one row per metric, in the order of the catalogue."""
    return HEAD + "".join(map(_row, METRICS))


def _row(metric: Metric) -> str:
    labels = f" {{{metric.label}: {', '.join(metric.values)}}}" if metric.label else ""
    cells = (f"`{metric.name}`{labels}", metric.kind, metric.unit, metric.meaning, metric.advice)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
