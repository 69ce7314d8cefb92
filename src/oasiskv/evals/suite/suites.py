"""Which models, tasks, lengths and budgets make a suite."""

from dataclasses import dataclass

from oasiskv.evals.methods import ASSISTED, METHODS


@dataclass(frozen=True)
class Part:
    """Tasks on one model at one length.

    Args:
        model: built-in name.
        tokens: prompt, question and new tokens together.
        tasks: name -> number of questions.
        budgets: K in tokens.
        assistant: built-in name of a model that drafts; None: no method that needs one.
        ablations: methods that differ in settings only, and the few that they are compared with,
            instead of all others.
    """

    model: str
    tokens: int
    tasks: dict[str, int]
    budgets: tuple[int, ...]
    assistant: str | None = None
    ablations: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods: all that can run, or ablations."""
        if self.ablations:
            return (*_ABLATED, *(name for name, method in METHODS.items() if method.ablation))
        can = (name for name, method in METHODS.items() if not method.ablation)
        return tuple(name for name in can if name != ASSISTED or self.assistant)


_ABLATED = ("dense", "exact", "oasis-oracle", "oasis-oracle1", "oasis-none", "stale")
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
_BUDGETS = (512, 1024, 2048)

# There is no smaller model with this vocabulary: each built-in one drafts for the other. The base
# has 8,192 positions, too few for most of what the other is asked; and an assistant drafts for one
# question after the other, which takes a GPU most of the time of a batch.
SUITES = {
    "quick": (Part(_BASE, 3256, {"forced_prose": 2}, (512, 1024), _LONG),),
    "ablation": (
        Part(_BASE, 3256, {"forced_prose": 2}, (512, 1024), ablations=True),
        Part(_LONG, 4096, {"json_pairs": 12, "needle_keys": 4}, (512,), ablations=True),
    ),
    "full": (
        Part(_BASE, 7500, {"free": 1}, (1024,)),
        Part(_BASE, 7500, {"forced_prose": 2}, _BUDGETS, _LONG),
        Part(_BASE, 7500, {"forced_code": 2, "forced_manual": 2}, _BUDGETS),
        *(
            Part(_LONG, tokens, dict.fromkeys(_ANSWERS, 4), _BUDGETS)
            for tokens in (8192, 16384, 32768)
        ),
    ),
}
