"""How a task's loss calls its model."""

from __future__ import annotations

from typing import Any

from torch import nn

from floatplan.errors import TaskError
from floatplan.records import Explanation
from floatplan.tasks.batches import random_states_kept
from floatplan.tasks.function import loss_of
from floatplan.tasks.task import Task
from floatplan.watch import explain


class _Called(BaseException):
    """The model was called: out of the loss, past whatever it catches."""


def first_call(name: str, task: Task, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with which the loss first calls the model; it does not run.

    Raises:
        TaskError: the loss raised before, or does not call the model.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _Called

    hook = task.model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        with random_states_kept():
            loss_of(name, task, batch)
    except _Called:
        return found[0]
    finally:
        hook.remove()
    raise TaskError(f"{name}: the loss does not call the model that it is given, as in model(batch)")


def explain_task(name: str, task: Task, batch: Any, **how: Any) -> Explanation:
    """`explain` of the task's model on what its loss gives it.

    Args:
        name: of the task.
        task: whose model is on the batch's device.
        batch: one of the task's.
        how: as `explain` takes them.

    Raises:
        TaskError: as `first_call`.
    """
    args, kwargs = first_call(name, task, batch)
    return explain(task.model, args, kwargs, **how)
