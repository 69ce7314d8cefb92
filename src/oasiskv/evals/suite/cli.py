"""``oasiskv eval``: suites of tasks, with every method at every budget."""

import importlib.util
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from rich.table import Table

from oasiskv import __version__
from oasiskv.errors import ConfigError
from oasiskv.evals.methods import ASSISTED, DENSE, METHODS
from oasiskv.evals.suite.compare import compare
from oasiskv.evals.suite.jobs import JOBS, batches_of
from oasiskv.evals.suite.jobs import run as run_batches
from oasiskv.evals.suite.plots import plot
from oasiskv.evals.suite.rows import RowFile, read_rows
from oasiskv.evals.suite.suites import BUDGETS, SUITES, Part
from oasiskv.evals.suite.tables import cell, markdown
from oasiskv.evals.tasks import TASKS
from oasiskv.hf.loading import pick_device
from oasiskv.options import Device

app = typer.Typer()

Out = Annotated[Path, typer.Option(help="folder of results; a run that was killed goes on there")]
Seed = Annotated[int, typer.Option(help="of tasks and methods")]
Jobs = Annotated[int | None, typer.Option(help="processes at once", min=1)]
AtOnce = Annotated[
    int | None, typer.Option(help="questions in memory at once; default by the device", min=1)
]
OUT = Path("oasiskv-eval")


class SuiteName(StrEnum):
    """A suite of tasks."""

    QUICK = "quick"
    ABLATION = "ablation"
    FULL = "full"


@app.callback(invoke_without_command=True)
def suite_command(
    context: typer.Context,
    suite: Annotated[
        SuiteName | None,
        typer.Option(
            help="quick: all methods, minutes on two CPU cores; ablation: what OasisKV's own "
            "settings cost, likewise; full: a GPU"
        ),
    ] = None,
    at_once: AtOnce = None,
    out: Out = OUT,
    seed: Seed = 0,
    jobs: Jobs = None,
    device: Device = None,
) -> None:
    """Measure accuracy and traffic: a suite of tasks with every method, or one of the commands."""
    if context.invoked_subcommand is not None:
        return
    if suite is None:
        raise ConfigError(f"give --suite {' or '.join(SUITES)}, or a command: see --help")
    described = {"suite": suite.value}
    _run(SUITES[suite.value], described, out, seed, jobs, device, at_once)


@app.command("run")
def run_command(
    model: Annotated[str, typer.Option(help="built-in name, folder or hub id")],
    tokens: Annotated[int, typer.Option(help="prompt, question and answer together")] = 8192,
    task: Annotated[
        list[str] | None, typer.Option(help="repeat it; default all: `eval list` shows them")
    ] = None,
    questions: Annotated[int, typer.Option(help="of each task", min=1)] = 4,
    method: Annotated[
        list[str] | None, typer.Option(help="beside dense; repeat it; default all but ablations")
    ] = None,
    budget: Annotated[
        list[int] | None, typer.Option(help=f"K in tokens; repeat it; default {BUDGETS}")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help=f"model of the same vocabulary that drafts for {ASSISTED}")
    ] = None,
    at_once: AtOnce = None,
    out: Out = OUT,
    seed: Seed = 0,
    jobs: Jobs = None,
    device: Device = None,
) -> None:
    """The tasks and methods of your choice on a model of your own, computed in float32."""
    asked = dict.fromkeys(_known("--task", task or TASKS, TASKS), questions)
    others = [name for name in METHODS if name != DENSE]
    only = _known("--method", method or (), others)
    if only and (ASSISTED in only) != (assistant is not None):
        raise ConfigError(f"--method {ASSISTED} and --assistant are needed together")
    budgets = tuple(dict.fromkeys(budget or BUDGETS))
    part = Part(model, tokens, asked, budgets, assistant, (DENSE, *only) if only else ())
    described = {
        "model": model,
        "tokens": tokens,
        "tasks": part.tasks,
        "methods": part.methods,
        "budgets": part.budgets,
        "assistant": assistant,
    }
    _run([part], described, out, seed, jobs, device, at_once)


@app.command("list")
def list_command() -> None:
    """Show the tasks and the methods."""
    for title, known in (("task", TASKS), ("method", METHODS)):
        table = Table(title, "what it is", title_justify="left")
        for name, one in known.items():
            table.add_row(name, one.doc)
        Console().print(table)


@app.command("tables")
def tables_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, of different seeds say")],
) -> None:
    """Print the tables of several runs together, as Markdown."""
    _require_packages()
    rows = [row for folder in runs for row in read_rows(folder / "rows.jsonl")]
    typer.echo(markdown(rows, seed=0), nl=False)


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(help="folder of a run")],
    second: Annotated[Path, typer.Argument(help="folder of another one, of another seed say")],
) -> None:
    """Count the figures of the second run that are inside the first one's intervals."""
    _require_packages()
    ours, theirs = (read_rows(folder / "rows.jsonl") for folder in (first, second))
    figures = compare(ours, theirs, seed=0)
    outside = [each for each in figures if not each.inside]
    table = Table("outside", "first", "second")
    for each in outside:
        table.add_row(each.what, cell(each.first, 4), cell(each.second, 4))
    if outside:
        Console().print(table)
    Console().print(f"{len(figures) - len(outside)} of {len(figures)} figures are inside")


def _run(
    parts: Sequence[Part],
    described: dict[str, Any],
    out: Path,
    seed: int,
    jobs: int | None,
    device: str | None,
    at_once: int | None,
) -> None:
    """Measure what is not in ``out`` yet, then write and print tables and a picture."""
    _require_packages()
    where = pick_device(device)
    run = {"oasiskv": __version__, **described, "seed": seed, "device": where.type}
    kept = RowFile(out / "rows.jsonl", run)
    batches, there = batches_of(parts, seed, kept, where, at_once)
    total = there + sum(len(batch.questions) for batch in batches)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("questions", total=total, completed=there)
        count = jobs or JOBS[where.type]
        run_batches(batches, where, count, kept, lambda: progress.advance(task))
    text = markdown(kept.rows, seed)
    (out / "tables.md").write_text(text, encoding="utf-8")
    plot(kept.rows, out / "quality.png", seed)
    Console().print(Markdown(text))


def _known(option: str, names: Iterable[str], there: Collection[str]) -> list[str]:
    """Names, once each.

    Raises:
        ConfigError: one is not there.
    """
    found = list(dict.fromkeys(names))
    for name in found:
        if name not in there:
            raise ConfigError(f"{option} {name}: needed is one of {', '.join(there)}")
    return found


def _require_packages() -> None:
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a suite needs {' and '.join(missing)}: pip install 'oasiskv[eval,models]'"
        )
