"""``oasiskv bench``: what OasisKV's vLLM plugin is for, measured beside stock vLLM."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from oasiskv.bench.acceptance import Passages, measure_acceptance
from oasiskv.bench.capacity import EngineReport, Workload, measure
from oasiskv.config import OasisConfig
from oasiskv.models.resolve import resolve_model

app = typer.Typer(no_args_is_help=True)

_MIB = 2**20
_ROWS: dict[str, Callable[[EngineReport], object]] = {
    "decoding at once": lambda r: r.decoding_at_once,
    "preemptions": lambda r: r.preemptions,
    "KV pool, MiB": lambda r: f"{r.pool_bytes / _MIB:.2f}",
    "pool, blocks": lambda r: f"{r.pool_blocks} of {r.block_tokens} tokens",
    "pool in use, most": lambda r: r.peak_pool_blocks,
    "blocks of a request, dense, most": lambda r: r.dense_peak_blocks,
    "blocks of a request, sparse, most": lambda r: _or_dash(r.decode_peak_blocks),
    "blocks of a request, sparse, least": lambda r: _or_dash(r.decode_least_blocks),
    "store blocks in use, most": lambda r: r.store_peak_blocks,
    "host store, MiB": lambda r: f"{r.store_bytes / _MIB:.2f}",
    "digests, MiB": lambda r: f"{r.digest_bytes / _MIB:.2f}",
    "steps": lambda r: r.steps,
    "seconds": lambda r: f"{r.seconds:.1f}",
}


@app.command("capacity")
def capacity_command(
    model: Annotated[
        str | None,
        typer.Option(help="built-in name, folder or hub id; default a random two-layer Llama"),
    ] = None,
    requests: Annotated[int, typer.Option(help="requests, all there at once")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="random tokens of each prompt")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="tokens decoded of each")] = 256,
    pool_tokens: Annotated[
        int | None,
        typer.Option(help="KV memory, in tokens of stock's pool; default: no third request fits"),
    ] = None,
    budget: Annotated[int, typer.Option(help="K: wanted tokens per step, layer, KV head")] = 128,
    hot: Annotated[int, typer.Option(help="S: tokens of the hot set")] = 256,
    sink: Annotated[int, typer.Option(help="first tokens, always in the fast tier")] = 16,
    window: Annotated[int, typer.Option(help="most recent tokens, always in the fast tier")] = 64,
    host_gib: Annotated[
        float | None, typer.Option(help="size of the host store; default what the requests need")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
) -> None:
    """Requests that decode at once in the same KV memory: stock vLLM, then OasisKV, on the CPU."""
    workload = Workload(requests, prompt_tokens, new_tokens, pool_tokens)
    config = OasisConfig(
        budget_tokens=budget,
        hot_tokens=hot,
        sink_tokens=sink,
        window_tokens=window,
        host_gib=host_gib,
    )
    folder = None if model is None else resolve_model(model)
    stock, oasis = measure(workload, config, folder)
    if as_json:
        result = {"workload": asdict(workload), "stock": asdict(stock), "oasis": asdict(oasis)}
        sys.stdout.write(json.dumps(result) + "\n")
        return
    title = f"{requests} requests of {prompt_tokens} + {new_tokens} tokens, hot set {hot}"
    table = Table("", "stock vLLM", "OasisKV", title=title, title_justify="left")
    for name, show in _ROWS.items():
        table.add_row(name, str(show(stock)), str(show(oasis)))
    Console().print(table)


@app.command("acceptance")
def acceptance_command(
    model: Annotated[
        str, typer.Option(help="target: built-in name, folder or hub id")
    ] = "smollm2-135m",
    draft_model: Annotated[str, typer.Option(help="the draft model, likewise")] = "smollm2-135m",
    texts: Annotated[int, typer.Option(help="passages of the bundled novel")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of each passage")] = 2000,
    new_tokens: Annotated[int, typer.Option(help="tokens decoded of each")] = 128,
    draft_tokens: Annotated[int, typer.Option(help="drafts a step")] = 3,
    budget: Annotated[int, typer.Option(help="K: wanted tokens per step, layer, KV head")] = 256,
    hot: Annotated[
        list[int] | None, typer.Option(help="S: tokens of the hot set, one or several")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
) -> None:
    """Drafts of a draft model that are accepted: stock vLLM, then OasisKV, on the CPU."""
    passages = Passages(texts, prompt_tokens, new_tokens, draft_tokens)
    reports = measure_acceptance(
        passages, resolve_model(model), resolve_model(draft_model), budget, hot or [384, 768, 1536]
    )
    if as_json:
        rows = [asdict(report) | {"share": report.share} for report in reports]
        sys.stdout.write(json.dumps({"passages": asdict(passages), "engines": rows}) + "\n")
        return
    title = f"{texts} passages of {prompt_tokens} + {new_tokens} tokens, budget {budget}"
    table = Table("hot set", "drafts", "accepted", "share", "tokens a forward", title=title)
    for report in reports:
        table.add_row(
            "stock" if report.hot_tokens is None else str(report.hot_tokens),
            str(report.drafts),
            str(report.accepted),
            f"{report.share:.3f}",
            f"{report.tokens_per_forward:.2f}",
        )
    Console().print(table)


def _or_dash(blocks: int | None) -> str:
    return "-" if blocks is None else str(blocks)
