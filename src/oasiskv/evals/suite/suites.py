"""Which models, tasks, lengths and budgets make a suite."""

from dataclasses import dataclass

from oasiskv.evals.methods import ASSISTED, METHODS


@dataclass(frozen=True)
class Part:
    """Tasks on one model at one length.

    Args:
        model: built-in name, folder or hub id.
        tokens: prompt, question and new tokens together.
        tasks: name -> number of questions.
        budgets: K in tokens.
        assistant: likewise, of a model that drafts; None: no method that needs one.
        only: names of methods; empty: all that can run but ablations.
    """

    model: str
    tokens: int
    tasks: dict[str, int]
    budgets: tuple[int, ...]
    assistant: str | None = None
    only: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        if self.only:
            return self.only
        can = (name for name, method in METHODS.items() if not method.ablation)
        return tuple(name for name in can if name != ASSISTED or self.assistant)


# What differs in settings only, and what it is compared with.
_ABLATIONS = (
    *("dense", "exact", "oasis-oracle", "oasis-oracle1", "oasis-none", "stale"),
    *(name for name, method in METHODS.items() if method.ablation),
)
_ANSWERS = (
    "passkey",
    "needle_keys",
    "needle_values",
    "needle_queries",
    "needle_turns",
    "json_pairs",
    "variables",
    "table_middle",
    "table_spread",
)
_BASE, _LONG = "smollm2-135m", "smollm2-135m-32k"
BUDGETS = (512, 1024, 2048)

# There is no smaller model with this vocabulary: each built-in one drafts for the other. The base
# has 8,192 positions, too few for most of what the other is asked; and an assistant drafts for one
# question after the other, which takes a GPU most of the time of a batch.
SUITES = {
    "quick": (Part(_BASE, 3256, {"forced_prose": 2}, (512, 1024), _LONG),),
    "ablation": (
        Part(_BASE, 3256, {"forced_prose": 2}, (512, 1024), only=_ABLATIONS),
        Part(_LONG, 4096, {"json_pairs": 12, "needle_keys": 4}, (512,), only=_ABLATIONS),
    ),
    "full": (
        Part(_BASE, 7500, {"free": 1}, (1024,)),
        Part(_BASE, 7500, {"forced_prose": 2}, BUDGETS, _LONG),
        Part(_BASE, 7500, {"forced_code": 2, "forced_manual": 2}, BUDGETS),
        *(
            Part(_LONG, tokens, dict.fromkeys(_ANSWERS, 4), BUDGETS)
            for tokens in (8192, 16384, 32768)
        ),
    ),
}
