"""The tasks of the accuracy instrument: what is asked, and what is right."""

from oasiskv.evals.tasks import needles, pairs, real_text, tables, variables
from oasiskv.evals.tasks.base import Part, Question, Task

_ALL: tuple[Task, ...] = (
    *needles.TASKS,
    *pairs.TASKS,
    *variables.TASKS,
    *tables.TASKS,
    *real_text.TASKS,
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""Name -> task, in the order of the docs."""

__all__ = ["TASKS", "Part", "Question", "Task"]
