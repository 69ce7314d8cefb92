"""Traces as tables at a terminal, one or two beside each other."""

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from oasiskv.trace.format import Trace
from oasiskv.trace.stats import WARM_UP, TraceStats


def shape_table(traces: Mapping[str, Trace]) -> Table:
    """What each trace is.

    Args:
        traces: title -> trace.
    """
    table = Table("", *traces)
    rows = [_shape(trace) for trace in traces.values()]
    for name in rows[0]:
        table.add_row(name, *(escape(row[name]) for row in rows))
    return table


def miss_table(stats: Mapping[str, TraceStats]) -> Table:
    """Missing blocks at each size of the hot set.

    Args:
        stats: title -> statistics, all of the same ratios.
    """
    title = f"missing / wanted, without the first 1/{WARM_UP} of the steps"
    table = Table("S/K", title=title)
    for name in ("mean", "p95 of steps", "p95 of heads"):
        for whose in stats:
            table.add_column(f"{name}, {whose}" if len(stats) > 1 else name, justify="right")
    shares = [each.miss_shares() for each in stats.values()]
    first = next(iter(stats.values()))
    for ratio, *row in zip(first.ratios, *shares, strict=True):
        cells = [
            f"{getattr(share, field):.4f}"
            for field in ("mean", "p95_steps", "p95_rows")
            for share in row
        ]
        table.add_row(f"{ratio:g}", *cells)
    return table


def reuse_table(stats: Mapping[str, TraceStats]) -> Table:
    """How long ago wanted blocks were last wanted.

    Args:
        stats: title -> statistics.
    """
    table = Table("steps since last wanted", title="share of wanted blocks")
    for name in stats:
        table.add_column(name, justify="right")
    shares = [each.reuse_shares() for each in stats.values()]
    longest = max(shares, key=len)
    for name in longest:
        table.add_row(name, *(f"{share.get(name, 0.0):.4f}" for share in shares))
    return table


def _shape(trace: Trace) -> dict[str, str]:
    head, run = trace.header, trace.header.recording
    size = head.block_tokens
    first, last = trace.candidates
    made = "recorded"
    if head.replay is not None:
        from_ = head.replay
        made = (
            f"replayed from {from_.layers} layers x {from_.kv_heads} KV heads, "
            f"K {from_.budget_blocks * size}, {from_.steps} steps; seed {from_.seed}"
        )
    return {
        "model": run.model,
        "text": f"{run.text}, {run.context_tokens} tokens",
        "run": f"{run.lookahead}, drafts {run.drafts}, {run.digest}, hysteresis "
        f"{run.hysteresis:g}, S {run.hot_blocks * size}, cap {run.cap_blocks} blocks",
        "made": made,
        "layers x KV heads": f"{head.layers} x {head.kv_heads}",
        "steps": str(head.steps),
        "context, tokens": f"{trace.positions[0]} to {trace.positions[-1]}",
        "candidate blocks": f"{first} to {last}, of {size} tokens",
        "K": f"{head.budget_blocks} blocks, {head.budget_blocks * size} tokens",
        "changes": str(head.changes),
        "written by": head.written_by,
    }
