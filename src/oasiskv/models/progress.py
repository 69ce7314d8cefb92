"""The progress bar of a model that is being fetched or converted."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float], None]
"""``report(what, done)``: what is being done now, and the share in [0, 1] that is behind us."""


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Show a bar on stderr for as long as the block runs; yields what moves it.

    Args:
        title: name of the model being made.
    """
    # The stream is bound now: transformers' bars are silenced by redirecting sys.stderr later.
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, redirect_stderr=False) as bar:
        task = bar.add_task(title, total=1.0)

        def report(what: str, done: float) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done)

        yield report
        report("ready", 1.0)
