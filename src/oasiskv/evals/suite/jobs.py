"""All batches of a suite, by several processes at once."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from multiprocessing import get_context

import torch
from transformers import PretrainedConfig, PreTrainedModel

from oasiskv.errors import ConfigError, ModelError, PromptError
from oasiskv.evals.suite.rows import Row, RowFile
from oasiskv.evals.suite.run import Batch, measure
from oasiskv.evals.suite.suites import Part
from oasiskv.evals.tasks import TASKS
from oasiskv.evals.tasks.base import Question
from oasiskv.hf.loading import LoadedModel, load_model, read_config, read_model, sliding_windows
from oasiskv.hf.tokens import load_tokenizer
from oasiskv.models.quiet import quiet_transformers
from oasiskv.models.resolve import resolve_model

AT_ONCE = {"cpu": 1, "cuda": 8}
"""Questions of a batch. A GPU takes about as long for eight as for one; a CPU for each alike."""
MOST_ROWS = 9 * 2**17
"""Most prompt tokens of a batch, times query heads: what is computed of them took 60 GiB of an H200
beside a model of 135M parameters with 9 query heads."""
JOBS = {"cpu": 2, "cuda": 1}
"""Processes, where nothing is said: two on one GPU were no faster than one (H200)."""


def batches_of(
    parts: Sequence[Part],
    seed: int,
    kept: RowFile,
    device: torch.device,
    at_once: int | None = None,
) -> tuple[list[Batch], int]:
    """What is to be measured, part by part, and how many questions of it are there already.

    Questions that take about as many steps are put together.

    Args:
        parts: of a suite.
        seed: of tasks and methods.
        kept: what was measured before.
        device: where models run.
        at_once: most questions of a batch; None: ``AT_ONCE``, or as many as ``MOST_ROWS`` allow.

    Raises:
        ModelError: a model cannot be read, or decoded in lanes.
        PromptError: a task has no such length, or a model has not.
    """
    batches = []
    there = 0
    for part in parts:
        folder = resolve_model(part.model)
        config = read_config(folder)
        _check(part, config)
        tokenizer = load_tokenizer(folder)
        every = [
            question
            for task, count in part.tasks.items()
            for question in TASKS[task].make(tokenizer, count, part.tokens, seed)
        ]
        whole = Batch(part.model, part.tokens, (), part.budgets, part.methods, seed, part.assistant)
        todo = [each for each in every if whole.unit(each) not in kept.units]
        there += len(every) - len(todo)
        fit = MOST_ROWS // (part.tokens * config.num_attention_heads)
        size = at_once or max(1, min(AT_ONCE[device.type], fit))
        for _, kind in groupby(sorted(todo, key=_place), key=lambda each: each.kind):
            own = list(kind)
            batches += [
                replace(whole, questions=tuple(own[start : start + size]))
                for start in range(0, len(own), size)
            ]
    return batches, there


def _check(part: Part, config: PretrainedConfig) -> None:
    if any(window is not None for window in sliding_windows(config)):
        raise ModelError(
            f"{part.model} has layers with a sliding window, and a suite decodes models with full "
            "attention in all layers only: `oasiskv eval harness` takes this model"
        )
    if part.tokens > config.max_position_embeddings:
        raise PromptError(
            f"questions of {part.tokens} tokens were asked for, and {part.model} allows "
            f"{config.max_position_embeddings}: give --tokens {config.max_position_embeddings} or "
            "fewer"
        )


def _place(question: Question) -> tuple[str, int]:
    forced = len(question.answer) if question.kind == "forced" else 0
    return question.kind, -(len(question.question) + forced + question.new_tokens)


def run(
    batches: Sequence[Batch],
    device: torch.device,
    jobs: int,
    kept: RowFile,
    on_question: Callable[[], None],
) -> None:
    """Measure.

    Args:
        batches: what to measure.
        device: where models run.
        jobs: processes, each with a model of its own.
        kept: takes what is measured.
        on_question: called for each question.

    Raises:
        OasisError: a batch failed; what others gave is kept.
    """
    if not batches:
        return
    # Spawned: a process that has used CUDA cannot be forked.
    pool = ProcessPoolExecutor(
        min(jobs, len(batches)),
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    try:
        running: list[Future[dict[str, list[Row]]]] = [
            pool.submit(_measure, batch, device.type) for batch in batches
        ]
        for future in as_completed(running):
            for unit, rows in future.result().items():
                kept.add(unit, rows)
                on_question()
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(batch: Batch, device: str) -> dict[str, list[Row]]:
    try:
        assistant = None if batch.assistant is None else _load_assistant(batch.assistant, device)
        return measure(_load(batch.model, device), batch, assistant)
    except torch.OutOfMemoryError as error:
        count = len(batch.questions)
        less = f"--at-once {count // 2} takes less" if count > 1 else "needed is a larger GPU"
        raise ConfigError(
            f"{count} of the questions of {batch.tokens} tokens do not fit the GPU at once "
            f"beside {batch.model}: {less}, or `oasiskv eval run` with fewer --budget and --method"
        ) from error


@lru_cache(maxsize=1)
def _load(model: str, device: str) -> LoadedModel:
    with quiet_transformers():
        return load_model(resolve_model(model), device=torch.device(device))


@lru_cache(maxsize=1)
def _load_assistant(model: str, device: str) -> PreTrainedModel:
    with quiet_transformers():
        return read_model(resolve_model(model), torch.float32).to(torch.device(device))
