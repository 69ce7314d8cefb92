"""What a task gives to whoever measures methods: questions made of token ids.

A runner prefills ``prompt``, decodes ``question`` by teacher forcing, sparsely, and then

- kind ``answer``: decodes ``new_tokens`` greedily and calls ``score`` with them;
- kind ``forced``: decodes ``answer`` by teacher forcing and compares each step with dense;
- kind ``free``: decodes ``new_tokens`` freely and compares with what dense decodes.

Prompt, question and new tokens together are never longer than the ``tokens`` that were asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

Kind = Literal["answer", "forced", "free"]


@dataclass(frozen=True)
class Part:
    """Something that an answer of several parts must hold.

    Args:
        ids: its token ids, which must come in a row.
        row: token ids that say which row of a table it belongs to; empty: it may stand anywhere.
    """

    ids: list[int]
    row: list[int]


@dataclass(frozen=True)
class Question:
    """One thing to ask, with everything that judging the answer takes.

    Args:
        task: name of its task.
        name: unique within a run over several tasks, and the same whenever the seed is.
        group: what a paired bootstrap resamples: the text that the question is about.
        prompt: token ids that are prefilled.
        question: token ids that are decoded before the answer, by teacher forcing; may be empty.
        answer: token ids wanted (``answer``), the continuation to force (``forced``), or none.
        kind: how it is judged.
        new_tokens: tokens to decode after the question.
        parts: what counts in an answer of several parts; empty: the whole answer, exactly.
    """

    task: str
    name: str
    group: str
    prompt: list[int]
    question: list[int]
    answer: list[int]
    kind: Kind
    new_tokens: int
    parts: tuple[Part, ...] = ()

    def score(self, tokens: Sequence[int]) -> float:
        """How right decoded tokens are, 0 to 1: the share of the parts, or all or nothing.

        Args:
            tokens: token ids decoded after the question; more than the answer are allowed.
        """
        given = list(tokens)
        if not self.parts:
            return float(given[: len(self.answer)] == self.answer)
        rows = {tuple(part.row): find(given, part.row) for part in self.parts if part.row}
        right = sum(_holds(_row(given, part, rows), part.ids) for part in self.parts)
        return right / len(self.parts)


class Task(Protocol):
    """A kind of question."""

    @property
    def name(self) -> str:
        """As users select it."""
        ...

    @property
    def doc(self) -> str:
        """What it asks, in one line."""
        ...

    def make(
        self, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
    ) -> list[Question]:
        """Make questions.

        Args:
            tokenizer: of the model.
            count: how many.
            tokens: length of prompt, question and new tokens together.
            seed: drives everything random.

        Raises:
            PromptError: ``tokens`` is too small for the task, or more than its texts have.
        """
        ...


def find(tokens: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """Where ``ids`` first stand in a row in ``tokens``, from ``start`` on; -1: nowhere."""
    for place in range(start, len(tokens) - len(ids) + 1):
        if list(tokens[place : place + len(ids)]) == list(ids):
            return place
    return -1


def _row(given: list[int], part: Part, rows: dict[tuple[int, ...], int]) -> list[int]:
    """The tokens from the row's name to the next row's name; all for a part of no row."""
    if not part.row:
        return given
    start = rows[tuple(part.row)]
    if start < 0:
        return []
    later = [place for place in rows.values() if place > start]
    return given[start : min(later, default=len(given))]


def _holds(tokens: list[int], ids: list[int]) -> bool:
    return find(tokens, ids) >= 0
