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


_ASKED = {
    "passkey": 4,
    "needles-keys": 4,
    "needles-values": 4,
    "needles-queries": 4,
    "json": 4,
    "variables": 4,
    "table": 4,
}
_BUDGETS = (512, 1024, 2048)

SUITES = {
    "quick": (Part("smollm2-135m", 3256, {"prose": 2}, (512, 1024)),),
    "full": (
        Part("smollm2-135m", 7500, {"prose": 2, "code": 2, "manual": 2}, _BUDGETS),
        Part("smollm2-135m", 7500, {"free": 1}, (1024,)),
        *(Part("smollm2-135m-32k", tokens, _ASKED, _BUDGETS) for tokens in (8192, 16384, 32768)),
    ),
}
