"""Quality against budget, and quality against bytes moved."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path

from oasiskv.evals.methods import DENSE
from oasiskv.evals.suite.rows import Row
from oasiskv.evals.suite.tables import MIB, figure, of, sections, settings, usable


def plot(rows: Sequence[Row], path: Path, seed: int) -> None:
    """One line of pictures a section: against K, and against MiB moved a step."""
    # With the other packages that only evaluation needs.
    from matplotlib.figure import Figure

    titled = sections(rows)
    canvas = Figure(figsize=(11, 3.6 * len(titled)), layout="constrained")
    axes = canvas.subplots(len(titled), 2, squeeze=False)
    for (by_budget, by_bytes), (title, asked) in zip(axes, titled.items(), strict=True):
        own = usable(asked)
        name = "score" if asked[0].kind == "answer" else "agree"
        for axis, label in ((by_budget, "K, tokens"), (by_bytes, "moved, MiB a step")):
            axis.set(xlabel=label, ylabel=name, title=title)
            dense = figure(of(own, DENSE, 0), name, seed)
            axis.axhline(dense.mean, ls="--", color="gray", label=DENSE)
        for method in dict.fromkeys(row.method for row in own if row.method != DENSE):
            budgets = [budget for each, budget in settings(own) if each == method]
            points = [of(own, method, budget) for budget in budgets]
            found = [figure(point, name, seed) for point in points]
            moved = [figure(point, "moved_bytes", seed).mean / MIB for point in points]
            means = [each.mean for each in found]
            spread = (
                [0 if isnan(each.low) else each.mean - each.low for each in found],
                [0 if isnan(each.high) else each.high - each.mean for each in found],
            )
            by_budget.errorbar(budgets, means, spread, marker="o", capsize=2, label=method)
            by_bytes.plot(moved, means, marker="o", label=method)
        by_bytes.set_xscale("symlog", linthresh=0.1)
        by_budget.legend(fontsize="x-small")
    canvas.savefig(path)
