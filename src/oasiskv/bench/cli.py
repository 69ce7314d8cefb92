"""``oasiskv bench``: what fits in a KV pool, beside stock vLLM; how fast the ops are."""

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
from oasiskv.bench.decode import SHAPES, DecodeLoad, DecodeReport, measure_decode
from oasiskv.bench.ops import OpTime, measure_ops
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

_OP_COLUMNS: dict[str, Callable[[OpTime], str]] = {
    "op": lambda op: op.name,
    "form": lambda op: op.form,
    "MB": lambda op: f"{op.moved_bytes / 1e6:.1f}",
    "floor, us": lambda op: f"{op.floor_us:.1f}",
    "median, us": lambda op: f"{op.time.median_us:.1f}",
    "10 to 90 %, us": lambda op: f"{op.time.low_us:.1f} to {op.time.high_us:.1f}",
    "of floor": lambda op: f"{op.share:.3f}",
}

_DECODE_ROWS: dict[str, Callable[[DecodeReport], str]] = {
    "prefill alone, tokens/s": lambda r: f"{r.prefill_tokens_per_s:,.0f}",
    "all requests decode after, s": lambda r: f"{r.all_decode_s:.2f}",
    "step, median, ms": lambda r: f"{r.step_ms:.2f}",
    "10 to 90 %": lambda r: f"{r.low_ms:.2f} to {r.high_ms:.2f}",
    "tokens a step": lambda r: f"{r.tokens_per_step:.2f}",
    "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
    "KV blocks in use": lambda r: f"{r.pool_blocks:,} of {r.block_tokens} tokens",
    "fetched a step, MB": lambda r: f"{r.fetched_bytes_per_step / 1e6:.2f}",
    "step under the profiler, ms": lambda r: f"{r.parts.step_ms:.2f}",
    "device busy, ms": lambda r: f"{r.parts.busy_ms:.2f}",
    "device idle, ms": lambda r: f"{r.parts.idle_ms:.2f}",
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


@app.command("ops")
def ops_command(
    device: Annotated[str, typer.Option(help="cuda: kernels and references; cpu: references")],
    only: Annotated[str, typer.Option(help="ops whose name starts so, such as 'score'")] = "",
    repeats: Annotated[int, typer.Option(help="timed calls of each kernel", min=1)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
) -> None:
    """Each op against the bytes that it must move, kernels checked first."""
    report = measure_ops(device, only=only, repeats=repeats)
    if as_json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        return
    title = (
        f"{report.device}: copy {report.copy_gbps:.0f} GB/s, from host {report.h2d_gbps:.1f}, "
        f"to host {report.d2h_gbps:.1f}"
    )
    table = Table(*_OP_COLUMNS, title=title, title_justify="left")
    for op in report.ops:
        table.add_row(*(show(op) for show in _OP_COLUMNS.values()))
    console = Console()
    console.print(table)
    for name, shape in {op.name: op.shape for op in report.ops}.items():
        console.print(f"{name}: {shape}", highlight=False)
    for beside in report.interference:
        console.print(
            f"matrix products beside a gather of {beside.programs} programs: "
            f"{100 * beside.slowdown:.1f} % slower ({beside.alone.median_us:.0f} us alone); "
            f"the gather {beside.gather_beside_us:.0f} us for {beside.gather_alone_us:.0f} us",
            highlight=False,
        )


@app.command("decode")
def decode_command(
    host_gib: Annotated[float, typer.Option(help="size of the host store")],
    model: Annotated[
        str,
        typer.Option(
            help="built-in name, folder or hub id, prompted with the bundled novel from different "
            "places; or llama-3.1-8b, the shape without weights, prompted with random tokens"
        ),
    ] = "llama-3.1-8b",
    requests: Annotated[int, typer.Option(help="requests that decode at once")] = 16,
    prompt_tokens: Annotated[
        int, typer.Option(help="tokens of each prompt; the novel starts again at its end")
    ] = 16384,
    draft_tokens: Annotated[int, typer.Option(help="n-gram drafts a step, both engines")] = 0,
    steps: Annotated[int, typer.Option(help="timed steps", min=2)] = 128,
    budget: Annotated[int, typer.Option(help="K: wanted tokens per step, layer, KV head")] = 2048,
    hot: Annotated[int, typer.Option(help="S: tokens of the hot set")] = 3072,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
) -> None:
    """Speed of prefill and of decoding: stock vLLM, then OasisKV, on a GPU."""
    load = DecodeLoad(requests, prompt_tokens, draft_tokens, steps=steps)
    config = OasisConfig(budget_tokens=budget, hot_tokens=hot, host_gib=host_gib)
    folder = model if model in SHAPES else resolve_model(model)
    stock, oasis = measure_decode(load, config, folder)
    if as_json:
        result = {"load": asdict(load), "stock": asdict(stock), "oasis": asdict(oasis)}
        sys.stdout.write(json.dumps(result) + "\n")
        return
    title = f"{model}: {requests} requests of {prompt_tokens} tokens, hot set {hot}"
    table = Table("", "stock vLLM", "OasisKV", title=title, title_justify="left")
    for name, show in _DECODE_ROWS.items():
        table.add_row(name, show(stock), show(oasis))
    for part in stock.parts.parts_ms:
        both = (f"{report.parts.parts_ms[part]:.2f}" for report in (stock, oasis))
        table.add_row(f"  {part}, ms", *both)
    Console().print(table)


def _or_dash(blocks: int | None) -> str:
    return "-" if blocks is None else str(blocks)
