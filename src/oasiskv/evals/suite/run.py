"""Ask every question with every method at every budget."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil

import torch
from torch import Tensor

from oasiskv.evals.methods import METHODS, Decoded
from oasiskv.evals.suite.rows import QUARTERS, Row, RowFile
from oasiskv.evals.tasks.base import Question
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled, prefill

DENSE = "dense"


def points(
    questions: Sequence[Question], methods: Sequence[str], budgets: Sequence[int]
) -> list[tuple[Question, str, int]]:
    """Everything to measure, in order: dense first, the anchor of its question."""
    return [
        (question, method, budget)
        for question in questions
        for method, budget in [(DENSE, 0)]
        + [(method, budget) for budget in budgets for method in methods if method != DENSE]
    ]


def run(
    loaded: LoadedModel,
    questions: Sequence[Question],
    methods: Sequence[str],
    budgets: Sequence[int],
    seed: int,
    kept: RowFile,
    on_row: Callable[[], None],
) -> None:
    """Measure what is not there yet.

    Args:
        loaded: the model.
        questions: what to ask.
        methods: names of ``METHODS``; dense is always there.
        budgets: K in tokens.
        seed: of what is random in methods.
        kept: what is there, and takes what is measured.
        on_row: called after each row, those that were there included.
    """
    done = {row.key for row in kept.rows}
    for _, asked in groupby(points(questions, methods, budgets), key=lambda point: point[0].name):
        todo = []
        for question, method, budget in asked:
            if (question.name, method, budget) in done:
                on_row()
            else:
                todo.append((question, method, budget))
        if todo:
            anchor = _Anchor(loaded, todo[0][0], seed)
            for _, method, budget in todo:
                kept.add(anchor.measure(method, budget))
                on_row()


class _Anchor:
    """One question, prefilled and decoded densely: what methods are compared with."""

    def __init__(self, loaded: LoadedModel, question: Question, seed: int) -> None:
        self._loaded, self._question, self._seed = loaded, question, seed
        self._prefilled: Prefilled = prefill(loaded, question.prompt)
        self._forced, self._new = list(question.question), question.new_tokens
        if question.kind == "forced":
            self._forced, self._new = self._forced + list(question.answer), 0
        self._dense = self._decode(DENSE, 0, question.answer)
        if question.kind == "free":
            # From here on dense's own text is what every method continues, token by token: up to
            # its first difference that is its own greedy text.
            self._forced, self._new = self._forced + self._dense.tokens, 0
        self._log_probs = self._dense.logits.log_softmax(-1)

    def _decode(self, method: str, budget: int, expected: Sequence[int]) -> Decoded:
        return METHODS[method].decode(
            self._loaded,
            self._prefilled,
            self._question.prompt,
            self._forced,
            self._new,
            budget or 16,
            expected,
            self._seed,
        )

    def measure(self, method: str, budget: int) -> Row:
        """Decode with a method and compare."""
        question = self._question
        found = self._dense
        if method != DENSE:
            expected = self._dense.tokens if question.kind == "answer" else []
            found = self._decode(method, budget, expected)
        row = {
            "task": question.task,
            "question": question.name,
            "group": question.group,
            "kind": question.kind,
            "method": method,
            "budget": budget,
            "context": len(question.prompt),
            "moved_bytes": None if method == DENSE else found.moved_bytes,
            "mass": _mean_and_worst(found.mass),
            "recall": _mean_and_worst(found.recall),
            "agreement": found.agreement,
            "misses": found.misses,
        }
        if question.kind == "answer":
            row["score"] = question.score(found.tokens)
            row["dense_score"] = question.score(self._dense.tokens)
        else:
            row |= self._compare(found.logits, len(question.question))
        return Row(**row)

    def _compare(self, logits: Tensor, first: int) -> dict[str, object]:
        """From the logits of the tokens after the question."""
        ours, theirs = logits[first:].log_softmax(-1), self._log_probs[first:]
        tokens = torch.tensor(self._forced[first:])
        same = ours.argmax(-1) == theirs.argmax(-1)
        size = ceil(len(same) / QUARTERS)
        different = (~same).nonzero()
        return {
            "nll": -float(ours.gather(-1, tokens[:, None]).mean()),
            "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
            "agree": float(same.float().mean()),
            "agree_by_quarter": [float(part.float().mean()) for part in torch.split(same, size)],
            "first_difference": int(different[0]) if len(different) else len(same),
        }


def _mean_and_worst(values: Tensor) -> tuple[float, float] | None:
    return (float(values.mean()), float(values.min())) if values.numel() else None
