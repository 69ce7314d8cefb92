"""``oasiskv eval``: accuracy and traffic on real weights and real text."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from oasiskv.config import OasisConfig
from oasiskv.data import data_path
from oasiskv.errors import PromptError
from oasiskv.evals import churn, digests, retrieval
from oasiskv.evals.suite.cli import app
from oasiskv.hf.loading import load_model, pick_device
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models.resolve import resolve_model
from oasiskv.options import Device

__all__ = ["app"]

TEXT = "texts/persuasion.txt"


class Question(StrEnum):
    """Where the question of a retrieval case stands."""

    PROMPT = "prompt"
    DECODED = "decoded"


@app.command("retrieval")
def retrieval_command(
    model: Annotated[str, typer.Option()] = "smollm2-135m-32k",
    tokens: Annotated[int, typer.Option(help="length of text and question")] = 3000,
    positions: Annotated[int, typer.Option(help="cases, their facts at even depths")] = 20,
    budget: Annotated[int, typer.Option(help="K in tokens")] = 512,
    hot: Annotated[list[int] | None, typer.Option(help="S in tokens; repeat it")] = None,
    digest: Annotated[str, typer.Option(help="minmax or keys4")] = "keys4",
    question: Annotated[
        Question, typer.Option(help="prefilled with the text, or decoded sparsely")
    ] = Question.PROMPT,
    seed: Annotated[int, typer.Option()] = 0,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
) -> None:
    """Ask for planted facts: last query, held-back n-gram and oracle drafts side by side."""
    sizes = hot or [512, 768, 1024]
    config = OasisConfig.model_validate(
        {"budget_tokens": budget, "hot_tokens": max(sizes), "digest": digest}
    )
    folder = resolve_model(model)
    loaded = load_model(folder, device=pick_device(device))
    filler = data_path(TEXT).read_text(encoding="utf-8")
    cases = retrieval.make_cases(load_tokenizer(folder), filler, positions, tokens, seed)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("cases", total=len(cases))
        dense, outcomes = retrieval.run(
            loaded,
            cases,
            config,
            sizes,
            question.value,
            lambda done: progress.update(task, completed=done),
        )
    table = Table("hot", *retrieval.METHODS, title=f"right, of {sum(dense)} that dense gets right")
    found = {
        (o.hot_tokens, o.method): sum(r and d for r, d in zip(o.right, dense, strict=True))
        for o in outcomes
    }
    for size in sizes:
        table.add_row(str(size), *(str(found[size, method]) for method in retrieval.METHODS))
    Console().print(table, f"dense: {sum(dense)} of {len(dense)}")
    if out is not None:
        right = {f"{o.method}@{o.hot_tokens}": o.right for o in outcomes}
        out.write_text(json.dumps({"dense": dense, "right": right}, indent=1), encoding="utf-8")


@app.command("churn")
def churn_command(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    texts: Annotated[int, typer.Option(help="passages of the text")] = 2,
    tokens: Annotated[int, typer.Option(help="tokens prefilled of each")] = 4096,
    steps: Annotated[int, typer.Option(help="tokens decoded of each")] = 128,
    budget: Annotated[int, typer.Option(help="K in tokens")] = 1024,
    hot: Annotated[list[int] | None, typer.Option(help="S in tokens; repeat it")] = None,
    hysteresis: Annotated[list[float] | None, typer.Option(help="factor; repeat it")] = None,
    digest: Annotated[str, typer.Option(help="minmax or keys4")] = "keys4",
    device: Device = None,
) -> None:
    """Blocks missing per step as a share of the budget, uncapped, on real text."""
    sizes, factors = hot or [budget], hysteresis or [1.0, 2.0]
    config = OasisConfig.model_validate(
        {"budget_tokens": budget, "hot_tokens": max(sizes), "digest": digest}
    )
    folder = resolve_model(model)
    loaded = load_model(folder, device=pick_device(device))
    passages = _passages(folder, texts, tokens + steps)
    arms = [(factor, size) for size in sizes for factor in factors]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(arms) * texts)
        results = churn.run(loaded, passages, tokens, config, arms, lambda: progress.advance(task))
    table = Table("hot", "hysteresis", "missing / budget", "by text", "worst step")
    for result in results:
        mean = sum(result.per_text) / len(result.per_text)
        by_text = " ".join(f"{share:.3f}" for share in result.per_text)
        row = (f"{mean:.3f}", by_text, f"{result.worst_step:.3f}")
        table.add_row(str(result.hot_tokens), str(result.hysteresis), *row)
    Console().print(table)


@app.command("digests")
def digests_command(
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    texts: Annotated[int, typer.Option(help="passages of the text")] = 2,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 2500,
    budget: Annotated[int, typer.Option(help="K in tokens")] = 512,
    device: Device = None,
) -> None:
    """What each digest finds of what exact keys find."""
    folder = resolve_model(model)
    loaded = load_model(folder, device=pick_device(device))
    table = Table("digest", "share of KV", "recall", "worst layer", "mass")
    for row in digests.run(loaded, _passages(folder, texts, tokens), budget):
        numbers = (row.kv_share, row.recall, row.worst_recall, row.mass)
        table.add_row(row.name, *(f"{number:.4f}" for number in numbers))
    Console().print(table)


@app.command(
    "harness",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def harness_command(context: typer.Context) -> None:
    """EleutherAI's lm_eval with OasisKV as the model: every argument is lm_eval's, --help too."""
    from oasiskv.evals.harness_command import run_harness

    run_harness(context.args)


def _passages(folder: str | Path, count: int, tokens: int) -> list[list[int]]:
    """The first ``count`` passages of ``tokens`` tokens each of the bundled text."""
    text = data_path(TEXT).read_text(encoding="utf-8")
    ids = encode(load_tokenizer(folder), text, chat=False)
    if len(ids) < tokens * count:
        raise PromptError(f"texts={count} of {tokens} tokens, but there are {len(ids)} tokens")
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]
