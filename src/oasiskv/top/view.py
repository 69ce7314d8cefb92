"""A look at a server as a table."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table
from rich.text import Text

from oasiskv.metrics.catalog import PREFIX, ratio
from oasiskv.top.figures import Figures, figures
from oasiskv.top.scrape import Snapshot

NONE = "-"


def render(after: Snapshot, before: Snapshot | None, url: str, note: str = "") -> Table:
    """The table.

    Args:
        after: the last look.
        before: the one before, if the server has not started anew since.
        url: of the server.
        note: what there is to say beside it.
    """
    now, whole = (None if before is None else figures(after, before)), figures(after)
    models = ", ".join(after.models) or "no model"
    title = Text(f"OasisKV  {url}  {models}, {after.engines} engine(s)")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.caption, table.caption_justify = Text(note), "left"
    table.add_column("")
    table.add_column("now", justify="right", min_width=20)
    table.add_column("since its start", justify="right", min_width=18)
    for section in (_requests, _memory, _transfers):
        for name, first, second in section(after, now, whole):
            table.add_row(Text(name), Text(first), Text(second))
        table.add_section()
    return table


Row = tuple[str, str, str]


def _requests(after: Snapshot, now: Figures | None, whole: Figures) -> list[Row]:
    gauge = after.gauges
    running, waiting = gauge["vllm:num_requests_running"], gauge["vllm:num_requests_waiting"]
    sparse, dense = (gauge[f"{PREFIX}requests.{state}"] for state in ("sparse", "dense"))
    return [
        ("requests running, waiting", f"{running:.0f}, {waiting:.0f}", ""),
        ("sparse, dense", f"{sparse:.0f}, {dense:.0f}", ""),
        ("transitions", _count(now and now.transitions), _count(whole.transitions)),
        ("refused for store, pool, late", _refusals(now), _refusals(whole)),
        ("output tokens", _rate(now, "tokens", ""), _count(whole.tokens)),
        ("prompt tokens", _rate(now, "prompt_tokens", ""), _count(whole.prompt_tokens)),
        ("sparse steps", _rate(now, "sparse_steps", ""), _count(whole.sparse_steps)),
    ]


def _memory(after: Snapshot, now: Figures | None, whole: Figures) -> list[Row]:
    gauge = after.gauges
    size = gauge[f"{PREFIX}block_bytes"]
    context = gauge[f"{PREFIX}context_blocks.sparse"]
    resident = gauge[f"{PREFIX}resident_blocks.sparse"]
    times = ratio(context, resident)
    used, kept, free = (
        gauge[f"{PREFIX}store_blocks.{state}"] for state in ("used", "kept", "free")
    )
    share = ratio(used, used + kept + free)
    promised = gauge[f"{PREFIX}store_promised_blocks"]
    return [
        ("contexts of sparse requests", _bytes(context * size), ""),
        (
            "of that in KV memory",
            _bytes(resident * size) + ("" if times is None else f"  (1 / {times:.2f})"),
            "",
        ),
        ("store used", f"{_bytes(used * size)}  ({_percent(share)})", ""),
        ("store kept, free", f"{_bytes(kept * size)}, {_bytes(free * size)}", ""),
        ("store promised to requests", _bytes(promised * size), ""),
        ("prefix blocks found", _percent(now and now.prefix_hits), _percent(whole.prefix_hits)),
        ("blocks loaded", _rate(now, "loaded_blocks", ""), _count(whole.loaded_blocks)),
    ]


def _transfers(after: Snapshot, now: Figures | None, whole: Figures) -> list[Row]:
    return [
        ("fetched", _rate(now, "fetched", "bytes"), _bytes(whole.fetched)),
        ("fetched per step", _per_step(now), _per_step(whole)),
        ("share of the cap", _share_of_cap(now), _share_of_cap(whole)),
        ("hits", _percent(now and now.hits), _percent(whole.hits)),
        ("wait per step: mean, 99 %", _waits(now), _waits(whole)),
        ("prediction agreement", _percent(now and now.agreement), _percent(whole.agreement)),
    ]


def _rate(now: Figures | None, name: str, unit: str) -> str:
    value = None if now is None else now.per_second(getattr(now, name))
    if value is None:
        return NONE
    return f"{_bytes(value)}/s" if unit else f"{value:,.1f}/s"


def _refusals(found: Figures | None) -> str:
    return NONE if found is None else ", ".join(map(_count, found.refusals.values()))


def _per_step(found: Figures | None) -> str:
    if found is None or not found.sparse_steps:
        return NONE
    return _bytes(found.fetched / found.sparse_steps)


def _share_of_cap(found: Figures | None) -> str:
    return _percent(None if found is None else ratio(found.fetched, found.cap))


def _waits(found: Figures | None) -> str:
    if found is None or found.wait_s is None or found.wait_99_s is None:
        return NONE
    bound = "more" if math.isinf(found.wait_99_s) else f"<= {1000 * found.wait_99_s:g} ms"
    return f"{1000 * found.wait_s:.2f} ms, {bound}"


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"
