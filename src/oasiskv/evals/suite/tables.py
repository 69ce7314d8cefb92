"""A run's rows as Markdown: every figure with n and a 95 % interval, beside dense."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from oasiskv.evals.methods import DENSE, METHODS
from oasiskv.evals.statistics import Estimate, difference, estimate
from oasiskv.evals.suite.rows import Row

MIB = 2**20
Grouped = dict[str, list[float]]


def by_group(rows: Iterable[Row], name: str) -> Grouped:
    """Group -> values of one measurement; rows without it are left out."""
    found: Grouped = defaultdict(list)
    for row in rows:
        value = getattr(row, name)
        if value is not None:
            found[row.group].append(float(value[0] if isinstance(value, tuple) else value))
    return found


def answered(rows: Sequence[Row]) -> list[Row]:
    """Those whose question dense answers, at least in part."""
    return [row for row in rows if row.dense_score]


def settings(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Methods and budgets, best known first; dense, which has no budget, with 0."""
    found = {(row.method, row.budget) for row in rows}
    order = list(METHODS)
    return sorted(found, key=lambda each: (each[1], order.index(each[0])))


def of(rows: Sequence[Row], method: str, budget: int) -> list[Row]:
    """Rows of one method and budget, one a question."""
    return [row for row in rows if (row.method, row.budget) == (method, budget)]


def sections(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Title -> rows of one task, on one model at one length."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.model, row.tokens)):
        found[f"{row.task}, {row.model}, {row.tokens:,} tokens"].append(row)
    return dict(found)


def markdown(rows: Sequence[Row], seed: int) -> str:
    """All tables."""
    parts = []
    for title, own in sections(rows).items():
        table = _answers if own[0].kind == "answer" else _texts
        parts.append(f"## {title}\n\n{table(own, seed)}")
    worst = _worst(rows, seed)
    if worst:
        parts.append(f"## Where most is lost\n\n{worst}")
    parts.append(f"## What is attended to\n\n{_diagnostics(rows, seed)}")
    return "\n\n".join(parts) + "\n"


def _answers(rows: list[Row], seed: int) -> str:
    dense = of(rows, DENSE, 0)
    right = sum(bool(row.dense_score) for row in dense)
    lines = [
        f"Dense answers {right} of {len(dense)}; the others are left out.\n",
        "| method | K | score | less than dense by | n | moved, MiB a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    anchor = by_group(answered(dense), "score")
    for method, budget in settings(rows):
        own = answered(of(rows, method, budget))
        score = by_group(own, "score")
        if score:
            less = difference(anchor, score, seed)
            moved = _moved(estimate(by_group(own, "moved_bytes"), seed))
            cells = (_cell(estimate(score, seed)), _cell(less), len(own), moved)
            lines.append(_line(method, budget, *cells))
    return "\n".join(lines)


def _texts(rows: list[Row], seed: int) -> str:
    lines = [
        "| method | K | KL from dense | agreement | by quarter | NLL | first difference | n | "
        "moved, MiB a step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, budget in settings(rows):
        own = of(rows, method, budget)
        quarters = zip(*(row.agree_by_quarter for row in own), strict=False)
        over_time = " ".join(f"{fmean(part):.3f}" for part in quarters)
        groups = {name: estimate(by_group(own, name), seed) for name in ("kl", "agree", "nll")}
        first = estimate(by_group(own, "first_difference"), seed)
        moved = _moved(estimate(by_group(own, "moved_bytes"), seed))
        lines.append(
            _line(
                method,
                budget,
                _cell(groups["kl"], 4),
                _cell(groups["agree"]),
                over_time,
                _cell(groups["nll"]),
                f"{first.mean:.0f}",
                len(own),
                moved,
            )
        )
    return "\n".join(lines)


def _diagnostics(rows: Sequence[Row], seed: int) -> str:
    lines = [
        "Means over tasks; worst: the least of any layer and KV head, mean over questions.\n",
        "| method | K | mass | worst | recall | worst | prediction agreement | misses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, budget in settings(rows):
        own = of(rows, method, budget)
        cells = []
        for name in ("mass", "recall"):
            pairs = [value for row in own if (value := getattr(row, name)) is not None]
            cells += [f"{fmean(each):.3f}" for each in zip(*pairs, strict=True)] or ["-", "-"]
        for name in ("agreement", "misses"):
            found = by_group(own, name)
            cells.append(f"{estimate(found, seed).mean:.3f}" if found else "-")
        lines.append(_line(method, budget, *cells))
    return "\n".join(lines)


def _worst(rows: Sequence[Row], seed: int) -> str:
    """The task and setting where OasisKV loses most."""
    losses = []
    for title, asked in sections([row for row in rows if row.kind == "answer"]).items():
        own = answered(asked)
        anchor = by_group(of(own, DENSE, 0), "score")
        for method, budget in settings(own):
            if method.startswith("oasis"):
                less = difference(anchor, by_group(of(own, method, budget), "score"), seed)
                losses.append((less.mean, title, method, budget, less))
    if not losses:
        return ""
    _, title, method, budget, less = max(losses, key=lambda loss: loss[0])
    return f"{title}, {method}, K = {budget}: {_cell(less)} less than dense, n = {less.groups}."


def _line(method: str, budget: int, *cells: object) -> str:
    return "| " + " | ".join(map(str, (method, budget or "-", *cells))) + " |"


def _cell(found: Estimate, digits: int = 3) -> str:
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _moved(found: Estimate) -> str:
    return f"{found.mean / MIB:.2f}" if found.groups else "-"
