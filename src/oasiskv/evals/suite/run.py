"""Questions of one kind with every method at every budget: what is measured at a time."""

from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from oasiskv.config import BLOCK_TOKENS
from oasiskv.drafts.assistant import AssistantDrafts
from oasiskv.evals.lanes.asked import Asked, Decoded
from oasiskv.evals.lanes.decode import LaneDecoder
from oasiskv.evals.methods import DENSE, Setting
from oasiskv.evals.suite.rows import QUARTERS, Row
from oasiskv.evals.tasks.base import Question
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import prefill

PREFILL_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens of a prompt computed at once: as many as keep a device busy and fit."""


@dataclass(frozen=True)
class Batch:
    """What one process decodes at a time.

    Args:
        model: built-in name, folder or hub id.
        tokens: length that was asked for.
        questions: of one kind.
        budgets: K in tokens.
        methods: names of ``METHODS``; dense is always there.
        seed: of what is random in methods.
        assistant: likewise, of the model that drafts, where a method needs one.
    """

    model: str
    tokens: int
    questions: tuple[Question, ...]
    budgets: tuple[int, ...]
    methods: tuple[str, ...]
    seed: int
    assistant: str | None = None

    def unit(self, question: Question) -> str:
        """Name of a question, unique within a run."""
        return f"{self.model} {self.tokens} {question.name}"


def measure(
    loaded: LoadedModel, batch: Batch, assistant: PreTrainedModel | None = None
) -> dict[str, list[Row]]:
    """Name of each question -> a row for dense, and one for each other method and budget.

    Args:
        loaded: a model with full attention in all layers.
        batch: what to measure.
        assistant: drafts where a method needs one.

    Raises:
        PromptError: questions are shorter than what budgets attend to anyway.
    """
    answers = batch.questions[0].kind == "answer"
    asked = [_asked(loaded, question) for question in batch.questions]
    dense = Setting.of(DENSE, BLOCK_TOKENS)
    first = LaneDecoder(loaded, asked, [dense], batch.seed, keep_log_probs=not answers).run()
    anchors = [found[dense] for found in first]
    settings = [
        Setting.of(method, budget)
        for method in batch.methods
        if method != DENSE
        for budget in batch.budgets
    ]
    follow = [_after(one, anchor, answers) for one, anchor in zip(asked, anchors, strict=True)]
    drafts = None if assistant is None else AssistantDrafts(assistant, loaded.vocab_size)
    others = LaneDecoder(loaded, follow, settings, batch.seed, assistant=drafts).run()
    rows = {}
    for question, anchor, found in zip(batch.questions, anchors, others, strict=True):
        right = question.score(anchor.tokens) if answers else None
        rows[batch.unit(question)] = [
            _row(batch, question, DENSE, 0, anchor, right),
            *(
                _row(batch, question, each.method.name, each.config.budget_tokens, one, right)
                for each, one in found.items()
            ),
        ]
    return rows


def _asked(loaded: LoadedModel, question: Question) -> Asked:
    forced, new = [*question.question], question.new_tokens
    if question.kind == "forced":
        forced, new = [*forced, *question.answer], 0
    return Asked(
        question.name,
        prefill(loaded, question.prompt, PREFILL_TOKENS[loaded.device.type]),
        question.prompt,
        forced,
        new,
        stops=loaded.eos_tokens if question.kind == "answer" else frozenset(),
    )


def _after(asked: Asked, dense: Decoded, answers: bool) -> Asked:
    """What is asked of other methods, once dense's text is known.

    An answer is each method's own. Otherwise dense's text is what every method continues, token by
    token: up to its first difference that is its own greedy text.
    """
    if answers:
        return replace(asked, expected=dense.tokens)
    forced = [*asked.forced, *dense.tokens]
    return replace(asked, forced=forced, new_tokens=0, log_probs=dense.log_probs)


def _row(
    batch: Batch, question: Question, method: str, budget: int, found: Decoded, right: float | None
) -> Row:
    row: dict[str, Any] = {
        "model": batch.model,
        "task": question.task,
        "question": question.name,
        "group": question.group,
        "kind": question.kind,
        "method": method,
        "budget": budget,
        "tokens": batch.tokens,
        "moved_bytes": None if method == DENSE else found.moved_bytes,
        "mass": _mean_and_worst(found.mass),
        "recall": _mean_and_worst(found.recall),
        "agreement": found.agreement,
        "misses": found.misses,
    }
    if right is not None:
        row |= {"score": question.score(found.tokens), "dense_score": right}
    else:
        row |= _compared(found, len(question.question), method == DENSE)
    return Row(**row)


def _compared(found: Decoded, first: int, is_dense: bool) -> dict[str, Any]:
    """Of the tokens after the question."""
    nll = found.nll[first:]
    kl = [0.0] * len(nll) if is_dense else found.kl[first:]
    same = [True] * len(nll) if is_dense else found.same[first:]
    size = ceil(len(same) / QUARTERS)
    quarters = [same[start : start + size] for start in range(0, len(same), size)]
    return {
        "nll": fmean(nll),
        "kl": fmean(kl),
        "agree": fmean(same),
        "agree_by_quarter": [fmean(part) for part in quarters],
        "first_difference": same.index(False) if False in same else len(same),
    }


def _mean_and_worst(values: Tensor | None) -> tuple[float, float] | None:
    return None if values is None else (float(values.mean()), float(values.min()))
