"""An optimizer's own ``step`` in the middle of a window of an Amp: its gradients are scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from floatplan.errors import StepError

Waits = Callable[[torch.optim.Optimizer], bool]
_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakMethod[Waits]] = (
    weakref.WeakKeyDictionary()
)


def watch(optimizers: tuple[torch.optim.Optimizer, ...], waits: Waits) -> None:
    """From now on a step of ``optimizers`` is refused while ``waits``, a method, says that gradients do.

    One hook in a process, for all optimizers: the optimizers themselves stay as they are.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    for optimizer in optimizers:
        try:
            _watched[optimizer] = weakref.WeakMethod(waits)
        except TypeError:  # a wrapper that cannot be hashed or referred to, which runs no hooks either
            continue


_hooks: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    reference = _watched.get(optimizer)
    waits = None if reference is None else reference()
    if waits is not None and waits(optimizer):
        raise StepError(
            f"{type(optimizer).__name__}.step() was called while gradients of an Amp wait for their step, "
            "which are scaled and summed up; call amp.step() instead"
        )
