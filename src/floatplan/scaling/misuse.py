"""Wrong use that is found early: gradients of a loss that was not scaled, clipping before unscaling.

In the first iterations with an optimizer a hook on each of its parameters notes by which backward pass its
gradient was made, and hooks on what ``scale`` returns note which backward passes began there. Then the hooks
are removed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from floatplan import _torch
from floatplan.scaling.gradients import name_at, parameter_names

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler

ITERATIONS = 3
_SCALED, _PLAIN = 1, 2
_CLIPPED_BELOW = 100.0
"""Norm of scaled gradients up to which one that was just changed looks clipped."""


class Backwards:
    """Which backward passes of a scaler's outputs run now."""

    def __init__(self) -> None:
        self.running = 0

    def follow(self, output: torch.Tensor) -> None:
        """Notice backward passes through ``output``."""
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(self._begins)  # type: ignore[no-untyped-call]

    def _begins(self, _: torch.Tensor) -> None:
        # Not the number of the pass: a checkpoint that is computed again has a pass of its own, inside.
        self.running += 1
        _torch.at_the_end_of_this_backward(self._ends)

    def _ends(self) -> None:
        self.running = max(self.running - 1, 0)


class Watch:
    """How the gradients of one optimizer came about."""

    def __init__(self, optimizer: torch.optim.Optimizer, backwards: Backwards) -> None:
        self.left = ITERATIONS
        # By id of the parameter: id of its gradient, writes to that, kinds of backward passes it is made of.
        self._made: dict[int, tuple[int, int, int]] = {}
        self._backwards = weakref.ref(backwards)
        self._handles = [
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for group in optimizer.param_groups
            for param in group["params"]
            if isinstance(param, torch.Tensor) and param.requires_grad and param.is_leaf
        ]

    def _accumulated(self, param: torch.Tensor) -> None:
        backwards, grad = self._backwards(), param.grad
        if backwards is None or grad is None or grad.is_inference():
            return
        kinds = _SCALED if backwards.running else _PLAIN
        known, writes, before = self._made.get(id(param), (0, 0, 0))
        if known == id(grad) and grad._version == writes + 1:  # added to what was there
            kinds |= before
        self._made[id(param)] = (id(grad), grad._version, kinds)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Look at what was noted, before anything is unscaled; then forget it.

        Raises:
            RuntimeError: some gradients were made by a backward pass of a scaled loss, some were not.
        """
        made, self._made = self._made, {}
        kinds: dict[int, int] = {}
        grads, touched = [], True
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for position, param in enumerate(params):
            grad = param.grad
            known, writes, kind = made.get(id(param), (0, 0, 0))
            if grad is None or known != id(grad):
                continue
            kinds[position] = kind
            grads.append(grad)
            touched = touched and grad._version == writes + 1 and id(grad) not in scaler._unscaled
        together = 0
        for kind in kinds.values():
            together |= kind
        if together == _SCALED | _PLAIN:
            plain = [position for position, kind in kinds.items() if kind & _PLAIN]
            names = parameter_names(optimizer)
            first = ", ".join(name_at(names, position, params[position].shape) for position in plain[:3])
            more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
            raise RuntimeError(
                f"gradients of {first}{more} come, in whole or in part, from a backward pass of a loss that "
                "was not scaled, others from one that was: dividing them by the scale would be wrong. Call "
                "scaler.scale(loss).backward() for every loss. If such gradients are scaled in another way, "
                "pass check_losses=False to GradScaler."
            )
        if grads and touched:
            _warn_if_clipped(scaler, optimizer, grads)


def _warn_if_clipped(scaler: GradScaler, optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    """Each gradient was written to once since its backward pass: by clipping, if what remains is small."""
    norm = float(torch.nn.utils.get_total_norm(grads))
    scale = scaler.get_scale()
    if norm <= _CLIPPED_BELOW <= scale:
        scaler._notes.warn_once(
            optimizer,
            "clipped",
            f"gradients were changed between backward() and unscaling, and their norm is {norm:.3g} while "
            f"they are still {scale:g} times too large. If they were clipped, the model will hardly learn: "
            "call scaler.clip_grad_norm_(optimizer, max_norm), or unscale_(optimizer) before clipping.",
        )


def begin(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Check what the optimizer's watch has noted; watch it from now on if it is new."""
    note = scaler._notes.of(optimizer)
    if note.watch is not None:
        scaler._backwards.running = 0  # of passes that ended in an error
        note.watch.check(scaler, optimizer)
    elif not note.seen:
        note.seen = True
        note.watch = Watch(optimizer, scaler._backwards)
        scaler._watched += 1


def end_iteration(scaler: GradScaler) -> None:
    """Count an iteration for every optimizer that is watched, and stop in time."""
    for note in scaler._notes.all():
        watch = note.watch
        if watch is not None:
            watch.left -= 1
            if watch.left <= 0 or (note.reference is not None and note.reference() is None):
                watch.remove()
                note.watch = None
                scaler._watched -= 1
