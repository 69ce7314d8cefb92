"""All units of a suite, by several processes at once."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context

import torch

from oasiskv.evals.suite.rows import Row, RowFile
from oasiskv.evals.suite.run import Unit, measure
from oasiskv.evals.suite.suites import Part
from oasiskv.evals.tasks import TASKS
from oasiskv.hf.loading import LoadedModel, load_model
from oasiskv.hf.tokens import load_tokenizer
from oasiskv.models.quiet import quiet_transformers
from oasiskv.models.resolve import resolve_model


def units_of(parts: Sequence[Part], seed: int) -> list[Unit]:
    """Everything to measure, part by part, what takes longest first.

    Raises:
        PromptError: a task has no such length.
    """
    units = []
    for part in parts:
        own = []
        tokenizer = load_tokenizer(resolve_model(part.model))
        for task, count in part.tasks.items():
            for question in TASKS[task].make(tokenizer, count, part.tokens, seed):
                own += [
                    Unit(part.model, part.tokens, question, budget, part.methods, seed)
                    for budget in part.budgets
                ]
        units += sorted(own, key=lambda unit: -unit.decoded)
    return units


def run(
    units: Sequence[Unit],
    device: torch.device,
    jobs: int,
    kept: RowFile,
    on_unit: Callable[[], None],
) -> None:
    """Measure what is not there yet.

    Args:
        units: what to measure.
        device: where models run.
        jobs: processes, each with a model of its own.
        kept: what is there, and takes what is measured.
        on_unit: called for each unit, those that were there included.

    Raises:
        OasisError: a unit failed; what others gave is kept.
    """
    todo = []
    for unit in units:
        if unit.name in kept.units:
            on_unit()
        else:
            todo.append(unit)
    if not todo:
        return
    # Spawned: a process that has used CUDA cannot be forked.
    pool = ProcessPoolExecutor(
        min(jobs, len(todo)),
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    try:
        running: dict[Future[list[Row]], Unit] = {
            pool.submit(_measure, unit, device.type): unit for unit in todo
        }
        for future in as_completed(running):
            kept.add(running[future].name, future.result())
            on_unit()
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(unit: Unit, device: str) -> list[Row]:
    return measure(_load(unit.model, device), unit)


@lru_cache(maxsize=1)
def _load(model: str, device: str) -> LoadedModel:
    with quiet_transformers():
        return load_model(resolve_model(model), device=torch.device(device))
