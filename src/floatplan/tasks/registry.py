"""The tasks that commands know by name."""

from __future__ import annotations

from floatplan.errors import TaskError, nearest
from floatplan.tasks.digits import DIGITS, DIGITS_LINEAR
from floatplan.tasks.mnist import MNIST_TASK
from floatplan.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (DIGITS, DIGITS_LINEAR, MNIST_TASK)}


def task_named(name: str) -> Task:
    """The task called ``name``.

    Raises:
        TaskError: there is none; names the nearest, or all.
    """
    if name not in TASKS:
        hint = nearest(name, TASKS) or f"; known tasks: {', '.join(TASKS)}"
        raise TaskError(f"no task {name!r}{hint}")
    return TASKS[name]
