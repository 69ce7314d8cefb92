"""Quality against budget, and quality against bytes moved."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path

from oasiskv.evals.methods import DENSE, METHODS
from oasiskv.evals.suite.rows import Row
from oasiskv.evals.suite.tables import figure, of, sections, settings, usable


def plot(rows: Sequence[Row], path: Path, seed: int) -> None:
    """One line of pictures a section: against K, and against MiB moved a step."""
    # With the other packages that only evaluation needs.
    from matplotlib.figure import Figure

    titled = sections(rows)
    canvas = Figure(figsize=(12, 3.4 * len(titled)), layout="constrained")
    axes = canvas.subplots(len(titled), 2, squeeze=False)
    known = list(METHODS)
    lines = {}
    for (by_budget, by_bytes), (title, asked) in zip(axes, titled.items(), strict=True):
        own = usable(asked)
        name = "score" if asked[0].kind == "answer" else "agree"
        for axis, label in ((by_budget, "K, tokens"), (by_bytes, "moved, MiB a step")):
            axis.set(xlabel=label, ylabel=name, title=title)
            dense = figure(of(own, DENSE, 0), name, seed)
            lines[DENSE] = axis.axhline(dense.mean, ls="--", color="gray")
        for method in known:
            budgets = [budget for each, budget in settings(own) if each == method and budget]
            if not budgets:
                continue
            # A colour of its own in all pictures, and beside the others where it would hide them.
            place = known.index(method)
            points = [of(own, method, budget) for budget in budgets]
            found = [figure(point, name, seed) for point in points]
            moved = [figure(point, "moved_mib", seed).mean for point in points]
            means = [each.mean for each in found]
            spread = (
                [0 if isnan(each.low) else each.mean - each.low for each in found],
                [0 if isnan(each.high) else each.high - each.mean for each in found],
            )
            style = {"marker": "o", "ms": 4, "color": f"C{place % 10}"}
            style["ls"] = "-" if place < 10 else ":"
            beside = [budget * 1.015 ** (place - len(known) / 2) for budget in budgets]
            lines[method] = by_budget.errorbar(beside, means, spread, capsize=2, **style)
            by_bytes.plot(moved, means, **style)
        budgets = sorted({row.budget for row in own if row.budget})
        by_budget.set_xscale("log", base=2)
        by_budget.set_xticks(budgets, [str(budget) for budget in budgets])
        by_bytes.set_xscale("log")
    shown = sorted(lines, key=known.index)
    canvas.legend([lines[name] for name in shown], shown, loc="outside right upper", fontsize=8)
    canvas.savefig(path)
