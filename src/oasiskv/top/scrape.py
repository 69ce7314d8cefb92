"""Ask a server for its metrics. What comes back is not trusted."""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from oasiskv.errors import ConfigError, OasisError
from oasiskv.metrics.catalog import METRICS, PREFIX

MOST_BYTES = 16 * 2**20
"""Most of an answer that is read; a server with 64 engines gives less."""

TIMEOUT_S = 10.0

VLLM_COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
VLLM_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")

WAIT_BUCKET = f"{PREFIX}transfer_wait_seconds_bucket"

_LABEL_OF = {name: metric.label for metric in METRICS for name in metric.samples}
_NAMES = frozenset((*_LABEL_OF, *VLLM_COUNTERS, *VLLM_GAUGES))
_GAUGES = {metric.name for metric in METRICS if metric.kind == "gauge"}.union(VLLM_GAUGES)
_MOST_MODELS = 8
_MOST_NAME = 60


class ScrapeError(OasisError):
    """The server did not answer, or not with what is needed."""


@dataclass(frozen=True)
class Snapshot:
    """What a server said at one time, over all its engines.

    Args:
        taken: on the monotonic clock, seconds.
        counters: sample name -> sum; with a label of ours, ``name.value``.
        gauges: the same of what goes up and down.
        buckets: upper bound in seconds -> steps that waited no longer.
        models: that it serves.
        engines: that it has.
    """

    taken: float
    counters: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    gauges: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: defaultdict[float, float] = field(default_factory=lambda: defaultdict(float))
    models: tuple[str, ...] = ()
    engines: int = 0


def metrics_url(address: str) -> str:
    """URL of the metrics of a server.

    Args:
        address: ``http://host:8000``, with or without scheme and ``/metrics``.

    Raises:
        ConfigError: it is none.
    """
    full = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(full)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not full.isprintable() or " " in full:
        raise ConfigError(f"{address!r} is no address of a server, such as http://127.0.0.1:8000")
    return full if parts.path.rstrip("/") else full.rstrip("/") + "/metrics"


def scrape(url: str) -> Snapshot:
    """Ask once.

    Raises:
        ScrapeError: it cannot be reached, or what it says is not that of vLLM with OasisKV.
    """
    return parse(fetch(url), time.monotonic(), url)


def fetch(url: str) -> str:
    """The body at ``url``; neither proxies nor redirects are followed.

    Raises:
        ScrapeError: there is none, or it is too long, too slow or no text.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    deadline = time.monotonic() + TIMEOUT_S
    body = bytearray()
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            while part := answer.read1(2**16):
                body += part
                if len(body) > MOST_BYTES:
                    raise ScrapeError(f"{url} gives more than {MOST_BYTES} bytes: no metrics")
                if time.monotonic() > deadline:
                    raise ScrapeError(f"{url} did not answer in full within {TIMEOUT_S:g} s")
            if answer.length:
                raise ScrapeError(f"{url} ended its answer {answer.length} bytes too early")
        return body.decode()
    except urllib.error.HTTPError as error:
        raise ScrapeError(f"{url} answers with HTTP status {error.code}") from error
    except UnicodeDecodeError as error:
        raise ScrapeError(f"{url} gives no text") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ScrapeError(f"{url} cannot be reached: {_shown(str(reason))}") from error


def parse(body: str, taken: float, url: str) -> Snapshot:
    """What is of use in a server's metrics.

    Args:
        body: of the answer.
        taken: when, on the monotonic clock.
        url: of the server, for errors.

    Raises:
        ScrapeError: it is not that of vLLM with OasisKV.
    """
    lines = [line for line in body.split("\n") if line.startswith("vllm:")]
    if not lines:
        raise ScrapeError(f"{url} is no vLLM server: it has no metrics of vLLM's")
    if not any(line.startswith(PREFIX) for line in lines):
        raise ScrapeError(
            f"{url} is vLLM without OasisKV: start it with oasiskv serve, without OASISKV_DISABLE "
            "and --disable-log-stats"
        )
    found = Snapshot(taken)
    models, engines = set(), set()
    for line in lines:
        name, labels, value = _sample(line, url)
        if name not in _NAMES or not math.isfinite(value) or value < 0:
            continue
        models.add(labels.get("model_name", ""))
        engines.add((labels.get("model_name", ""), labels.get("engine", "")))
        if name == WAIT_BUCKET:
            found.buckets[_bound(labels.get("le", ""))] += value
            continue
        label = labels.get(_LABEL_OF.get(name) or "")
        key = name if label is None else f"{name}.{label}"
        (found.gauges if name in _GAUGES else found.counters)[key] += value
    shown = tuple(_shown(model) for model in sorted(models - {""})[:_MOST_MODELS])
    return Snapshot(taken, found.counters, found.gauges, found.buckets, shown, len(engines))


def _sample(line: str, url: str) -> tuple[str, dict[str, str], float]:
    name = line.partition("{")[0].partition(" ")[0]
    if name not in _NAMES:
        return name, {}, 0.0
    try:
        [family] = text_string_to_metric_families(line)
        [sample] = family.samples
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise ScrapeError(f"{url} gives metrics that are malformed: {_shown(line)}") from error
    return sample.name, sample.labels, float(sample.value)


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _shown(text: str) -> str:
    """Of text that is not ours what a terminal may be given."""
    short = text if len(text) <= _MOST_NAME else text[: _MOST_NAME - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in short)
