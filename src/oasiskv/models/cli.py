"""``oasiskv models``: what is built in, and fetching it."""

import typer

from oasiskv.models.cache import models_root
from oasiskv.models.catalog import BUILT_INS, BuiltIn
from oasiskv.models.prepare import fetch_model, ready_folder

app = typer.Typer(help="List and fetch the built-in models.")


@app.callback(invoke_without_command=True)
def list_models(context: typer.Context) -> None:
    """List the built-in models: name, context, size on disk, licence, fetched or not, folder."""
    if context.invoked_subcommand is not None:
        return
    header = ("NAME", "CONTEXT", "SIZE", "LICENCE", "FETCHED", "FOLDER")
    rows = [header, *map(_row, BUILT_INS.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@app.command("fetch")
def fetch(name: str = typer.Argument(help="A built-in model's name.")) -> None:
    """Fetch and convert a built-in model, once; prints its folder."""
    typer.echo(fetch_model(name))


def _row(model: BuiltIn) -> tuple[str, ...]:
    return (
        model.name,
        f"{model.context_tokens:,} tokens",
        f"{model.disk_bytes / 1e6:.0f} MB",
        model.licence,
        "yes" if ready_folder(model) else "no",
        str(models_root() / model.name),
    )
