"""A run's rows as Markdown: every figure with n and a 95 % interval, beside dense."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf, isnan

from oasiskv.evals.methods import DENSE, METHODS
from oasiskv.evals.statistics import SHARE, Estimate, difference, estimate
from oasiskv.evals.suite.rows import QUARTERS, Row

LEAST = 5
"""Questions that dense must answer of a task for its loss to be called one of the largest: of
fewer, hardly any loss is outside what chance gives."""
WORST = 5
"""How many of the largest losses are shown."""
Grouped = dict[str, list[float]]
UNBOUNDED = dict.fromkeys(("kl", "nll", "moved_mib", "first_difference"), (0.0, inf))
"""Measurements that are no shares."""
OVER_TIME = {f"quarter {part + 1}": ("agree_by_quarter", part) for part in range(QUARTERS)}
ATTENDED = {
    "mass": ("mass", 0),
    "worst mass": ("mass", 1),
    "recall": ("recall", 0),
    "worst recall": ("recall", 1),
}
PARTS = OVER_TIME | ATTENDED
"""Measurements that are one of several values of a row."""


def by_group(rows: Iterable[Row], name: str) -> Grouped:
    """Group -> values of one measurement; rows without it are left out."""
    found: Grouped = defaultdict(list)
    for row in rows:
        value = _value(row, name)
        if value is not None:
            found[row.group].append(value)
    return found


def _value(row: Row, name: str) -> float | None:
    if name not in PARTS:
        value = getattr(row, name)
        return None if value is None else float(value)
    whole, part = PARTS[name]
    values = getattr(row, whole)
    return float(values[part]) if values and part < len(values) else None


def figure(rows: Iterable[Row], name: str, seed: int) -> Estimate:
    """A measurement, over groups: the name of a row's value or one of ``PARTS``."""
    return estimate(by_group(rows, name), seed, UNBOUNDED.get(name, SHARE))


def answered(rows: Sequence[Row]) -> list[Row]:
    """Those whose question dense answers, at least in part."""
    return [row for row in rows if row.dense_score]


def usable(rows: Sequence[Row]) -> list[Row]:
    """Rows that figures are made of: texts, and questions that dense answers."""
    return [row for row in rows if row.kind != "answer"] + answered(rows)


def settings(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Methods and budgets, best known first; dense, which has no budget, with 0."""
    order = list(METHODS)
    found = {(row.method, row.budget) for row in rows}
    return sorted(found, key=lambda each: (each[1], order.index(each[0])))


def of(rows: Sequence[Row], method: str, budget: int) -> list[Row]:
    """Rows of one method and budget, one a question."""
    return [row for row in rows if (row.method, row.budget) == (method, budget)]


def sections(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Title -> rows of one kind of tasks, on one model at one length."""
    names = {"answer": "Answers", "forced": "Texts, forced", "free": "Texts written on"}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.kind, row.model, row.tokens)):
        found[f"{names[row.kind]}: {row.model}, {row.tokens:,} tokens"].append(row)
    return dict(found)


def tasks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Task -> its rows, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return found


def markdown(rows: Sequence[Row], seed: int) -> str:
    """All tables."""
    parts = []
    for title, own in sections(rows).items():
        table = _answers if own[0].kind == "answer" else _texts
        parts.append(f"## {title}\n\n{table(own, seed)}\n\n{_attended(own, seed)}")
    worst = _worst(rows, seed)
    if worst:
        parts.append(f"## Where most is lost\n\n{worst}")
    return "\n\n".join(parts) + "\n"


def _answers(rows: list[Row], seed: int) -> str:
    own = answered(rows)
    per_task = sorted(tasks(rows).items())
    heads = []
    for task, each in per_task:
        asked = of(each, DENSE, 0)
        heads.append(f"{task}, {len(answered(asked))} of {len(asked)}")
    anchor = by_group(of(own, DENSE, 0), "score")
    lines = [
        "Scores; after each task how many of its questions dense answers, at least in part: the "
        "others are left out.\n",
        _head(["all", "less than dense by", "MiB moved a step", *heads]),
    ]
    for method, budget in settings(own):
        mine = of(own, method, budget)
        less = _less(anchor, mine, seed)
        cells = [
            cell(figure(mine, "score", seed)),
            cell(less),
            cell(figure(mine, "moved_mib", seed), 2),
        ]
        cells += [
            cell(figure(answered(of(each, method, budget)), "score", seed), 2)
            for _, each in per_task
        ]
        lines.append(_line(method, budget, cells))
    lines.append(f"\nAll: {len(anchor)} questions.")
    return "\n".join(lines)


def _texts(rows: list[Row], seed: int) -> str:
    per_task = sorted(tasks(rows).items())
    heads = [f"KL, {task}, {len(of(each, DENSE, 0))}" for task, each in per_task]
    if len(per_task) == 1:
        per_task, heads = [], []
    names = ["KL from dense", "agreement", "NLL", "first difference", "MiB moved a step"]
    lines = [_head([*names, *heads])]
    for method, budget in settings(rows):
        own = of(rows, method, budget)
        cells = [
            cell(figure(own, "kl", seed), 4),
            cell(figure(own, "agree", seed)),
            cell(figure(own, "nll", seed)),
            cell(figure(own, "first_difference", seed), 0),
            cell(figure(own, "moved_mib", seed), 2),
        ]
        cells += [cell(figure(of(each, method, budget), "kl", seed), 4) for _, each in per_task]
        lines.append(_line(method, budget, cells))
    lines.append(f"\n{len({row.group for row in rows})} texts. Agreement over time:\n")
    return "\n".join([*lines, _measured(rows, list(OVER_TIME), seed)])


def _attended(rows: Sequence[Row], seed: int) -> str:
    names = [*ATTENDED, "agreement", "misses"]
    return (
        "What is attended to, of all texts or questions, n (worst: the least of any layer and KV "
        "head; agreement: of the prediction with the step's own choice):\n\n"
        f"{_measured(rows, names, seed, counted=True)}"
    )


def _measured(rows: Sequence[Row], names: Sequence[str], seed: int, counted: bool = False) -> str:
    lines = [_head([*names, "n"] if counted else names)]
    for method, budget in settings(rows):
        found = [figure(of(rows, method, budget), name, seed) for name in names]
        most = max(each.groups for each in found)
        if most:
            cells = [cell(each) for each in found]
            lines.append(_line(method, budget, [*cells, str(most)] if counted else cells))
    return "\n".join(lines)


def _worst(rows: Sequence[Row], seed: int) -> str:
    """The tasks and settings where OasisKV loses most, of those with questions enough to say so."""
    losses = []
    for asked in sections([row for row in rows if row.kind == "answer"]).values():
        for task, own in tasks(answered(asked)).items():
            anchor = by_group(of(own, DENSE, 0), "score")
            if len(anchor) < LEAST:
                continue
            for method, budget in settings(own):
                if method.startswith("oasis"):
                    less = _less(anchor, of(own, method, budget), seed)
                    losses.append((method, budget, own[0], task, less))
    if not losses:
        return ""
    lines = [
        f"The {WORST} largest losses of OasisKV, of tasks of which dense answers at least {LEAST} "
        "questions.\n",
        _head(["model", "tokens", "task", "less than dense by", "n"]),
    ]
    for method, budget, one, task, less in sorted(losses, key=lambda loss: -loss[-1].mean)[:WORST]:
        cells = [one.model, f"{one.tokens:,}", task, cell(less), str(less.groups)]
        lines.append(_line(method, budget, cells))
    return "\n".join(lines)


def _less(anchor: Grouped, rows: Sequence[Row], seed: int) -> Estimate:
    """How much less than dense some rows score; of runs together, a method may be in one only."""
    mine = by_group(rows, "score")
    return difference({group: anchor[group] for group in mine}, mine, seed, (-1, 1))


def _head(columns: Sequence[str]) -> str:
    names = ["method", "K", *columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names)))


def _line(method: str, budget: int, cells: Sequence[str]) -> str:
    return "| " + " | ".join((method, str(budget or "-"), *cells)) + " |"


def cell(found: Estimate, digits: int = 3) -> str:
    """A figure with its interval."""
    mean = f"{found.mean:.{digits}f}"
    if isnan(found.low):
        return mean if found.groups else "-"
    return f"{mean} ({found.low:.{digits}f} to {found.high:.{digits}f})"
