"""One question at one budget, with every method: the unit of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from oasiskv.config import BLOCK_TOKENS
from oasiskv.evals.methods import DENSE, METHODS, Decoded
from oasiskv.evals.suite.rows import QUARTERS, Row
from oasiskv.evals.tasks.base import Question
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import prefill


@dataclass(frozen=True)
class Unit:
    """What one process measures at a time.

    Args:
        model: built-in name.
        tokens: length that was asked for.
        question: what is asked.
        budget: K in tokens.
        methods: names of ``METHODS``.
        seed: of what is random in methods.
    """

    model: str
    tokens: int
    question: Question
    budget: int
    methods: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Unique within a run."""
        return f"{self.model} {self.tokens} {self.question.name} {self.budget}"

    @property
    def decoded(self) -> int:
        """Tokens that each method decodes: what takes the time."""
        forced = len(self.question.answer) if self.question.kind == "forced" else 0
        return len(self.question.question) + forced + self.question.new_tokens


def measure(loaded: LoadedModel, unit: Unit) -> list[Row]:
    """A row for each method, and one for dense."""
    anchor = _Anchor(loaded, unit)
    return [anchor.row(method) for method in dict.fromkeys((DENSE, *unit.methods))]


class _Anchor:
    """One question, prefilled and decoded densely: what methods are compared with."""

    def __init__(self, loaded: LoadedModel, unit: Unit) -> None:
        self._loaded, self._unit, self._question = loaded, unit, unit.question
        self._prefilled = prefill(loaded, self._question.prompt)
        self._forced, self._new = list(self._question.question), self._question.new_tokens
        if self._question.kind == "forced":
            self._forced, self._new = self._forced + list(self._question.answer), 0
        self._dense = self._decode(DENSE, BLOCK_TOKENS, [])
        if self._question.kind == "free":
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
            budget,
            expected,
            self._unit.seed,
        )

    def row(self, method: str) -> Row:
        """Decode with a method and compare."""
        question, is_dense = self._question, method == DENSE
        found = self._dense
        if not is_dense:
            expected = self._dense.tokens if question.kind == "answer" else []
            found = self._decode(method, self._unit.budget, expected)
        row: dict[str, Any] = {
            "model": self._unit.model,
            "task": question.task,
            "question": question.name,
            "group": question.group,
            "kind": question.kind,
            "method": method,
            "budget": self._unit.budget,
            "tokens": self._unit.tokens,
            "moved_bytes": None if is_dense else found.moved_bytes,
            "mass": None if is_dense else _mean_and_worst(found.mass),
            "recall": None if is_dense else _mean_and_worst(found.recall),
            "agreement": found.agreement,
            "misses": found.misses,
        }
        if question.kind == "answer":
            row["score"] = question.score(found.tokens)
            row["dense_score"] = question.score(self._dense.tokens)
        else:
            row |= self._compare(found.logits, len(question.question))
        return Row(**row)

    def _compare(self, logits: Tensor, first: int) -> dict[str, Any]:
        """From the logits of the tokens after the question."""
        ours, theirs = logits[first:].log_softmax(-1), self._log_probs[first:]
        tokens = torch.tensor(self._forced[first:])
        same = ours.argmax(-1) == theirs.argmax(-1)
        quarters = torch.split(same, ceil(len(same) / QUARTERS))
        different = (~same).nonzero()
        return {
            "nll": -float(ours.gather(-1, tokens[:, None]).mean()),
            "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
            "agree": float(same.float().mean()),
            "agree_by_quarter": [float(part.float().mean()) for part in quarters],
            "first_difference": int(different[0]) if len(different) else len(same),
        }


def _mean_and_worst(values: Tensor) -> tuple[float, float] | None:
    return (float(values.mean()), float(values.min())) if values.numel() else None
