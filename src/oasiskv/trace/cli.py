"""``oasiskv trace``: wanted blocks of real runs, recorded, shown and replayed at other shapes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from oasiskv.errors import ConfigError
from oasiskv.evals.methods import hot_tokens_of
from oasiskv.evals.tasks import TASKS
from oasiskv.hf.loading import load_model, pick_device
from oasiskv.hf.tokens import load_tokenizer
from oasiskv.models.resolve import resolve_model
from oasiskv.options import Device
from oasiskv.trace.format import Trace, write_trace
from oasiskv.trace.names import BUILT_IN, read_trace
from oasiskv.trace.record import record, recording_config
from oasiskv.trace.replay import replay
from oasiskv.trace.stats import measure
from oasiskv.trace.tables import miss_table, reuse_table, shape_table

app = typer.Typer(no_args_is_help=True)

Source = Annotated[str, typer.Argument(help=f"a file, or one of {', '.join(BUILT_IN)}")]
Out = Annotated[Path, typer.Option(help="file to write")]


@app.command("record")
def record_command(
    out: Out,
    model: Annotated[str, typer.Option(help="built-in name, folder or hub id")] = "smollm2-135m",
    task: Annotated[
        str, typer.Option(help="with a known answer: forced_prose, forced_code, needle, ...")
    ] = "forced_prose",
    tokens: Annotated[int, typer.Option(help="prompt and decoded tokens together")] = 7500,
    budget: Annotated[int, typer.Option(help="K in tokens")] = 1024,
    hot: Annotated[int | None, typer.Option(help="S of the run; default 3/2 of K")] = None,
    digest: Annotated[str, typer.Option(help="minmax or keys4")] = "keys4",
    seed: Annotated[int, typer.Option(help="of the task")] = 0,
    device: Device = None,
) -> None:
    """Decode a text by teacher forcing, and keep the blocks that each step wants."""
    if task not in TASKS:
        raise ConfigError(f"task={task!r} is unknown: one of {', '.join(TASKS)} is needed")
    # Recording takes minutes: what cannot be written is to be known before.
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: there is no folder {out.parent}; make it first")
    config = recording_config(budget, hot_tokens_of(budget) if hot is None else hot, digest)
    folder = resolve_model(model)
    [question] = TASKS[task].make(load_tokenizer(folder), 1, tokens, seed)
    loaded = load_model(folder, device=pick_device(device))
    # A folder's path says more about a machine than about a model.
    name = Path(model).name if Path(model).is_dir() else model
    total = len(question.prompt) + len(question.question) + len(question.answer)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(question.name, total=total)
        trace = record(
            loaded, question, config, name, lambda done: progress.update(bar, completed=done)
        )
        progress.update(bar, completed=total)
    write_trace(out, trace)
    _print({"recorded": trace})


@app.command("show")
def show_command(trace: Source) -> None:
    """What a trace is, what hot sets of several sizes miss, and how blocks come back."""
    _print({"trace": read_trace(trace)})


@app.command("replay")
def replay_command(
    trace: Source,
    out: Out,
    layers: Annotated[int | None, typer.Option(min=1, help="default as the source")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="KV heads of a layer")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="context at the first step; default the source's last")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="default as the source")] = None,
    budget: Annotated[
        int | None,
        typer.Option(min=1, help="K: a multiple of the source's; default as the context grows"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="deals KV heads")] = 0,
) -> None:
    """Write a trace of another shape, and print how it compares with its source."""
    source = read_trace(trace)
    made = replay(
        source,
        layers=layers,
        kv_heads=heads,
        context_tokens=tokens,
        steps=steps,
        budget_tokens=budget,
        seed=seed,
    )
    write_trace(out, made)
    _print({"source": source, "replay": made})


def _print(traces: dict[str, Trace]) -> None:
    stats = {name: measure(trace) for name, trace in traces.items()}
    Console().print(shape_table(traces), miss_table(stats), reuse_table(stats))
