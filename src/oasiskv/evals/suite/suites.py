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
        methods: names of methods; dense is always there.
        budgets: K in tokens.
    """

    model: str
    tokens: int
    tasks: dict[str, int]
    methods: tuple[str, ...]
    budgets: tuple[int, ...]

    @property
    def name(self) -> str:
        """What its results are kept under."""
        return f"{self.model}-{self.tokens}"


ALL = tuple(METHODS)
