"""Does a second run, of another seed say, bear the first one out?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oasiskv.evals.methods import DENSE
from oasiskv.evals.statistics import Estimate
from oasiskv.evals.suite.rows import Row
from oasiskv.evals.suite.tables import figure, of, sections, settings, tasks, usable

NAMES = ("score", "kl", "agree", "nll")


@dataclass(frozen=True)
class Figure:
    """One figure of a first run, and what a second one gave.

    Args:
        what: section, task, method, budget and name.
        first: with its interval.
        second: the second run's.
    """

    what: str
    first: Estimate
    second: Estimate

    @property
    def inside(self) -> bool:
        """The second mean is in the first interval, but for rounding."""
        return self.first.low - 1e-9 <= self.second.mean <= self.first.high + 1e-9


def compare(first: Sequence[Row], second: Sequence[Row], seed: int) -> list[Figure]:
    """All figures that have an interval in the first run and are in the second."""
    theirs = dict(_figures(second, seed))
    return [
        Figure(what, mine, theirs[what])
        for what, mine in _figures(first, seed)
        if what in theirs and mine.groups > 1 and theirs[what].groups
    ]


def _figures(rows: Sequence[Row], seed: int) -> Iterator[tuple[str, Estimate]]:
    for title, asked in sections(rows).items():
        per_task = tasks(usable(asked))
        parts = {"all tasks": usable(asked)} if len(per_task) > 1 else {}
        for task, own in (parts | per_task).items():
            for method, budget in settings(own):
                for name in NAMES:
                    # Dense is what the others are compared with.
                    if method == DENSE and name != "nll":
                        continue
                    found = figure(of(own, method, budget), name, seed)
                    if found.groups:
                        yield f"{title}, {task}, {method}, K = {budget or '-'}: {name}", found
