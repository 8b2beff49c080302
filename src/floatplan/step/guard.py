"""An optimizer's own ``step`` in the middle of a window of an Amp: its gradients are scaled."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from floatplan.errors import StepError


class Waiting(Protocol):
    """Says whether gradients of an optimizer wait for their step."""

    def waits_for_a_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of ``optimizer`` now would be wrong."""


_hooks: list[Any] = []
# By id, since an optimizer may be one that cannot be hashed.
_watched: dict[int, tuple[weakref.ref[torch.optim.Optimizer], list[weakref.ref[Waiting]]]] = {}


def watch(optimizers: tuple[torch.optim.Optimizer, ...], waiting: Waiting) -> None:
    """From now on a step of ``optimizers`` is refused while ``waiting`` says that gradients do.

    One hook in a process, for all optimizers: the optimizers themselves stay as they are.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    for key in [key for key, (optimizer, _) in _watched.items() if optimizer() is None]:
        del _watched[key]
    for optimizer in optimizers:
        known = _watched.get(id(optimizer))
        try:
            reference = weakref.ref(optimizer)
        except TypeError:  # a wrapper of a kind that runs no hooks either
            continue
        others = [one for one in known[1] if one() is not None] if known else []
        _watched[id(optimizer)] = reference, [*others, weakref.ref(waiting)]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    known = _watched.get(id(optimizer))
    if known is None or known[0]() is not optimizer:
        return
    for reference in known[1]:
        waiting = reference()
        if waiting is not None and waiting.waits_for_a_step(optimizer):
            raise StepError(
                f"{type(optimizer).__name__}.step() was called while gradients of an Amp wait for their "
                "step, which are scaled and summed up; call amp.step() instead, of that Amp if there are "
                "several"
            )
