"""Every metric of the plugin: its name, what it means, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm:oasiskv_"
"""vLLM drops metrics with its own prefix when an engine is made anew in a process, no others."""

WAIT_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        key: what it is called without prefix and suffix.
        kind: as Prometheus has it.
        unit: of a value.
        meaning: one sentence.
        advice: what a value says, and what changes it.
        label: a label beside vLLM's ``model_name`` and ``engine``, or none.
        values: that the label takes.
    """

    key: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    advice: str
    label: str = ""
    values: tuple[str, ...] = ("",)

    @property
    def name(self) -> str:
        """Full name, as ``/metrics`` has it; a histogram's samples have suffixes of their own."""
        return PREFIX + self.key + ("_total" if self.kind == "counter" else "")

    @property
    def keys(self) -> dict[str, str]:
        """Label value -> key under which engines report it."""
        return {value: f"{self.key}.{value}" if value else self.key for value in self.values}

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the samples that ``/metrics`` has of it."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))


METRICS = (
    Metric(
        "requests",
        "gauge",
        "requests",
        "Requests that have blocks, by how they attend now.",
        "Sparse ones are what OasisKV is for. All dense: contexts are below `threshold_tokens`, or "
        "`mode` is `under_pressure` and the KV memory has room.",
        "state",
        ("dense", "sparse"),
    ),
    Metric(
        "transitions",
        "counter",
        "requests",
        "Requests that went from dense to sparse.",
        "Once per request at most. Under pressure, many of them say that the KV memory is short: "
        "fewer requests at once, or a smaller `hot_tokens`.",
    ),
    Metric(
        "refusals",
        "counter",
        "steps",
        "Steps in which a request that waits was not let in: `store`, the host store has no room "
        "for all that it may become; `pool`, too few blocks of KV memory are free, the reserve for "
        "transitions left alone; `late`, what it left before is still being written.",
        "`store` grows: raise `host_gib` or lower `max_tokens` of requests. `pool` grows: lower "
        "`hot_tokens`, or give vLLM more KV memory. `late` grows: the store is slow or stalled.",
        "reason",
        ("store", "pool", "late"),
    ),
    Metric(
        "context_blocks",
        "gauge",
        "blocks of 16 tokens",
        "Blocks that the contexts of these requests have, wherever they are.",
        "Divided by `resident_blocks`: how much longer the contexts are than the KV memory holds.",
        "state",
        ("dense", "sparse"),
    ),
    Metric(
        "resident_blocks",
        "gauge",
        "blocks of 16 tokens",
        "Blocks of KV memory that these requests hold: all if dense; sink, slots and window if "
        "sparse. A block that requests share counts for each.",
        "Of a sparse request it is constant, and what `hot_tokens`, `sink_tokens` and "
        "`window_tokens` ask for.",
        "state",
        ("dense", "sparse"),
    ),
    Metric(
        "sparse_steps",
        "counter",
        "steps",
        "Steps with at least one sparse request.",
        "What the counters below are divided by, for their mean per step.",
    ),
    Metric(
        "wanted_tiles",
        "counter",
        "tiles",
        "Tiles (one block of one layer and KV head) that lookahead queries wanted.",
        "`budget_tokens` sets it.",
    ),
    Metric(
        "missed_tiles",
        "counter",
        "tiles",
        "Wanted tiles that were in no slot, before the cap.",
        "1 - missed / wanted is the hit rate. Below 90 %: raise `hot_tokens` or `hysteresis`.",
    ),
    Metric(
        "fetched_tiles",
        "counter",
        "tiles",
        "Tiles that went from the host store to slots.",
        "Well below `missed_tiles`: the cap leaves wanted tiles out; raise `cap_fraction`.",
    ),
    Metric(
        "fetched_bytes",
        "counter",
        "bytes",
        "Bytes of these tiles.",
        "Its rate is what the link carries. Near what the link can do (some 50 GB/s on PCIe 5 "
        "x16): lower `cap_fraction` or `budget_tokens`, or raise `hot_tokens`.",
    ),
    Metric(
        "fetch_cap_bytes",
        "counter",
        "bytes",
        "Most bytes that the same steps could have fetched, by `cap_fraction`.",
        "fetched / cap near 1: the cap binds, and prediction is held back by it.",
    ),
    Metric(
        "transfer_wait_seconds",
        "histogram",
        "seconds",
        "Time that a sparse step waited for the transfers of the step before. On CUDA, where a "
        "layer waits on its stream and nobody can be asked, the time that transfers ran on into "
        "the forward, sampled: at most this was waited for.",
        "A large share of the time between tokens: lower `cap_fraction`.",
    ),
    Metric(
        "compared_tiles",
        "counter",
        "tiles",
        "Tiles that a step's own query would want, in the steps that are compared with what was "
        "predicted for them: one in 32 of a request. Not on CUDA, where it would take a second "
        "scoring within the graphs.",
        "Only what `agreeing_tiles` is divided by.",
    ),
    Metric(
        "agreeing_tiles",
        "counter",
        "tiles",
        "Of these, those that had been predicted.",
        "agreeing / compared is the prediction agreement. Low: try `lookahead` `held_back` with "
        "drafts, or a larger `budget_tokens`.",
    ),
    Metric(
        "store_blocks",
        "gauge",
        "blocks of 16 tokens",
        "Blocks of the host store: `used` by requests, `kept` for prefixes that may come again, "
        "`free`.",
        "`kept` is given up when room is needed, so only `used` near the sum of the three is a "
        "full store: raise `host_gib`.",
        "state",
        ("used", "kept", "free"),
    ),
    Metric(
        "store_promised_blocks",
        "gauge",
        "blocks of 16 tokens",
        "Blocks of the host store that admitted requests may come to need in all.",
        "Near the store's size while little is used: requests ask for a `max_tokens` that they do "
        "not need.",
    ),
    Metric(
        "block_bytes",
        "gauge",
        "bytes",
        "Bytes of one block over all layers, KV heads and workers; the draft model's included.",
        "Turns blocks into bytes.",
    ),
    Metric(
        "prefix_queried_blocks",
        "counter",
        "blocks of 16 tokens",
        "Blocks of new requests that were looked for in the host store.",
        "What `prefix_hit_blocks` is divided by.",
    ),
    Metric(
        "prefix_hit_blocks",
        "counter",
        "blocks of 16 tokens",
        "Of these, those that it held. Some may have been in KV memory too.",
        "A low share while prompts do share prefixes: the store is too small to keep them, raise "
        "`host_gib`.",
    ),
    Metric(
        "loaded_blocks",
        "counter",
        "blocks of 16 tokens",
        "Blocks copied from the host store to KV memory before a forward: found prefixes, and what "
        "preempted requests had.",
        "Each is a block that was not computed again.",
    ),
)


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None where there is nothing to divide by."""
    return part / whole if whole else None
