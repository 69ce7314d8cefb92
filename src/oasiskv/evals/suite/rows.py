"""What is measured of one question, and the file that keeps it, so that a killed run goes on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oasiskv.errors import ConfigError

QUARTERS = 4
"""Parts of a continuation whose agreement is kept apart: agreement over time."""


@dataclass(frozen=True)
class Row:
    """One question, one method, one budget.

    Args:
        model: as it was given.
        task: its task.
        question: its name.
        group: what the bootstrap resamples.
        kind: ``answer``, ``forced`` or ``free``.
        method: the method.
        budget: K in tokens; 0 for dense.
        tokens: prompt, question and new tokens that were asked for.
        score: of an answer, 0 to 1.
        dense_score: of dense's answer; questions that dense fails are counted apart.
        nll: of the forced tokens, nats a token.
        kl: from dense, nats a token.
        agree: share of tokens whose most likely next token is dense's.
        agree_by_quarter: the same of each quarter.
        first_difference: tokens before the first that differs from dense's; all if none does.
        moved_bytes: a step.
        mass: share of the true attention attended to: mean and worst over layers and KV heads.
        recall: share of the best blocks attended to, likewise.
        agreement: of predicted with actual wanted blocks.
        misses: wanted blocks that were in no slot, as a share.
    """

    model: str
    task: str
    question: str
    group: str
    kind: str
    method: str
    budget: int
    tokens: int
    score: float | None = None
    dense_score: float | None = None
    nll: float | None = None
    kl: float | None = None
    agree: float | None = None
    agree_by_quarter: list[float] = field(default_factory=list)
    first_difference: int | None = None
    moved_bytes: float | None = None
    mass: tuple[float, float] | None = None
    recall: tuple[float, float] | None = None
    agreement: float | None = None
    misses: float | None = None

    @property
    def moved_mib(self) -> float | None:
        """MiB moved a step."""
        return None if self.moved_bytes is None else self.moved_bytes / 2**20


class RowFile:
    """JSON lines: first what the run is, then a unit each.

    Args:
        path: the file; made if it is not there.
        run: what the run is. A file of another run is refused.

    Attributes:
        units: name of a unit -> its rows.

    Raises:
        ConfigError: the file is of another run, or is not such a file.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self._path = path
        self.units: dict[str, list[Row]] = {}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run) + "\n", encoding="utf-8")
            return
        found, self.units, lines = _read(path)
        if found != json.loads(json.dumps(run)):
            raise ConfigError(
                f"{path} holds the results of another run, {found}; this one is {run}: give "
                "another --out"
            )
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    @property
    def rows(self) -> list[Row]:
        """Of all units, in one order whatever the order in which they ended."""
        return _in_order(self.units)

    def add(self, unit: str, rows: list[Row]) -> None:
        """Keep one more unit."""
        self.units[unit] = rows
        line = {"unit": unit, "rows": [asdict(row) for row in rows]}
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows of a run, whatever run it is, in the order of ``RowFile.rows``.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not there: a folder that `oasiskv eval --suite` wrote to")
    return _in_order(_read(path)[1])


def _read(path: Path) -> tuple[Any, dict[str, list[Row]], list[str]]:
    """What run it is, its units, and the lines that hold both."""
    # A line without its end was being written when the run was killed.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    units = {}
    try:
        found, *entries = [json.loads(line) for line in lines]
        for entry in entries:
            units[entry["unit"]] = [Row(**_tuples(row)) for row in entry["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} holds no results of this program ({error!r}): give another --out"
        ) from error
    return found, units, lines


def _in_order(units: dict[str, list[Row]]) -> list[Row]:
    return [row for name in sorted(units) for row in units[name]]


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    pairs = {name: tuple(entry[name]) for name in ("mass", "recall") if entry[name] is not None}
    return entry | pairs
