"""What two looks at a server say together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from oasiskv.metrics.catalog import PREFIX, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oasiskv.top.scrape import Snapshot


class Figures(NamedTuple):
    """What happened in some time.

    Attributes:
        seconds: how long that was; None if it is not known, as since the server's start.
        tokens: that were given out.
        prompt_tokens: that were computed or found.
        transitions: requests that went sparse.
        refusals: steps in which a waiting request was not let in, by reason.
        sparse_steps: steps with a sparse request.
        fetched: bytes from the store to slots.
        cap: most bytes that these steps could have fetched.
        hits: share of wanted tiles that were in a slot; None if nothing was wanted.
        wait_s: mean wait of a step for transfers; None if none did.
        wait_99_s: what 99 of 100 steps did not exceed, up to the next bound.
        agreement: share of what queries want that had been predicted; None if not measured.
        prefix_hits: share of blocks looked for in the store that it held; None if none was.
        loaded_blocks: copied from the store to KV memory.
    """

    seconds: float | None
    tokens: float
    prompt_tokens: float
    transitions: float
    refusals: dict[str, float]
    sparse_steps: float
    fetched: float
    cap: float
    hits: float | None
    wait_s: float | None
    wait_99_s: float | None
    agreement: float | None
    prefix_hits: float | None
    loaded_blocks: float

    def per_second(self, count: float) -> float | None:
        """``count`` of these by their time."""
        return ratio(count, self.seconds) if self.seconds is not None else None


def restarted(before: Snapshot, after: Snapshot) -> bool:
    """Whether the server has started anew in between: counters only grow."""
    return any(after.counters[name] < value for name, value in before.counters.items())


def figures(after: Snapshot, before: Snapshot | None = None) -> Figures:
    """What happened between two looks; with one, since the server's start."""
    counters = {
        name: value - (before.counters[name] if before is not None else 0)
        for name, value in after.counters.items()
    }
    buckets = {
        bound: steps - (before.buckets[bound] if before is not None else 0)
        for bound, steps in after.buckets.items()
    }

    def count(key: str) -> float:
        return counters.get(PREFIX + key, 0)

    wanted = count("wanted_tiles_total")
    return Figures(
        seconds=after.taken - before.taken if before is not None else None,
        tokens=counters.get("vllm:generation_tokens_total", 0),
        prompt_tokens=counters.get("vllm:prompt_tokens_total", 0),
        transitions=count("transitions_total"),
        refusals={reason: count(f"refusals_total.{reason}") for reason in REASONS},
        sparse_steps=count("sparse_steps_total"),
        fetched=count("fetched_bytes_total"),
        cap=count("fetch_cap_bytes_total"),
        hits=ratio(wanted - count("missed_tiles_total"), wanted),
        wait_s=ratio(count("transfer_wait_seconds_sum"), count("transfer_wait_seconds_count")),
        wait_99_s=_bound_of(buckets, 0.99),
        agreement=ratio(count("agreeing_tiles_total"), count("compared_tiles_total")),
        prefix_hits=ratio(count("prefix_hit_blocks_total"), count("prefix_queried_blocks_total")),
        loaded_blocks=count("loaded_blocks_total"),
    )


REASONS = ("store", "pool", "late")


def _bound_of(buckets: Mapping[float, float], share: float) -> float | None:
    """The least bound that ``share`` of all are within; None without any."""
    most = buckets.get(math.inf, 0)
    if most <= 0:
        return None
    return next(bound for bound in sorted(buckets) if buckets[bound] >= share * most)
