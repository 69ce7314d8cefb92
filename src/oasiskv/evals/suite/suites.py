"""Which models, tasks, lengths and budgets make a suite."""

from dataclasses import dataclass

from oasiskv.evals.methods import METHODS


@dataclass(frozen=True)
class Part:
    """Tasks on one model at one length.

    Args:
        model: built-in name.
        tokens: prompt, question and new tokens together.
        tasks: name -> number of questions.
        budgets: K in tokens.
        methods: names of methods; dense is always there.
    """

    model: str
    tokens: int
    tasks: dict[str, int]
    budgets: tuple[int, ...]
    methods: tuple[str, ...] = tuple(METHODS)


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
_TEXTS = {"forced_prose": 2, "forced_code": 2, "forced_manual": 2}
_BUDGETS = (512, 1024, 2048)

SUITES = {
    "quick": (Part("smollm2-135m", 3256, {"forced_prose": 2}, (512, 1024)),),
    "full": (
        Part("smollm2-135m", 7500, {"free": 1}, (1024,)),
        Part("smollm2-135m", 7500, _TEXTS, _BUDGETS),
        *(
            Part("smollm2-135m-32k", tokens, dict.fromkeys(_ANSWERS, 4), _BUDGETS)
            for tokens in (8192, 16384, 32768)
        ),
    ),
}
