"""Quality against budget, and quality against bytes moved."""

from collections.abc import Sequence
from pathlib import Path

from oasiskv.errors import ConfigError
from oasiskv.evals.methods import DENSE
from oasiskv.evals.statistics import estimate
from oasiskv.evals.suite.rows import Row
from oasiskv.evals.suite.tables import MIB, answered, by_group, of, sections, settings


def plot(rows: Sequence[Row], path: Path, seed: int) -> None:
    """One line of pictures a task: against K, and against MiB moved a step.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'oasiskv[plot]' (or --no-plots)"
        ) from error
    titled = sections(rows)
    figure = Figure(figsize=(11, 3.6 * len(titled)), layout="constrained")
    axes = figure.subplots(len(titled), 2, squeeze=False)
    for (by_budget, by_bytes), (title, own) in zip(axes, titled.items(), strict=True):
        name = "score" if own[0].kind == "answer" else "agree"
        usable = answered(own) if name == "score" else own
        dense = by_group(of(usable, DENSE, 0), name)
        for axis, label in ((by_budget, "K, tokens"), (by_bytes, "moved, MiB a step")):
            axis.set(xlabel=label, ylabel=name, title=title)
            if dense:
                axis.axhline(estimate(dense, seed).mean, ls="--", color="gray", label=DENSE)
        for method in dict.fromkeys(row.method for row in usable if row.method != DENSE):
            budgets = [budget for each, budget in settings(usable) if each == method]
            points = [of(usable, method, budget) for budget in budgets]
            found = [estimate(by_group(point, name), seed) for point in points]
            moved = [estimate(by_group(point, "moved_bytes"), seed) for point in points]
            means = [each.mean for each in found]
            spread = (
                [each.mean - each.low for each in found],
                [each.high - each.mean for each in found],
            )
            by_budget.errorbar(budgets, means, spread, marker="o", capsize=2, label=method)
            by_bytes.plot([each.mean / MIB for each in moved], means, marker="o", label=method)
        by_bytes.set_xscale("symlog", linthresh=0.1)
        by_budget.legend(fontsize="x-small")
    figure.savefig(path)
