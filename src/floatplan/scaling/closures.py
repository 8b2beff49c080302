"""Closures: the optimizer calls back for a loss and for gradients, which are unscaled and checked first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from floatplan.records import StepResult
from floatplan.scaling import gradients, protocol
from floatplan.scaling.changed import look_again
from floatplan.scaling.snapshot import Snapshot
from floatplan.scaling.written import is_torchs

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler

Closure = Callable[[], Any]
_ABOUT = (
    "A closure for GradScaler.step zeroes the gradients, computes the loss, calls "
    "scaler.scale(loss).backward() and returns the loss."
)


class NotFinite(Exception):
    """An evaluation gave a loss or gradients that are not finite: out of the optimizer's step."""


def taken_from(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """The closure among the arguments of ``step``; None if there is none."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) and not isinstance(closure, torch.Tensor) else None


def put_into(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[Any, dict[str, Any]]:
    """The arguments with another closure in the place of the user's."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is known to call the closure first and once: torch's own, but for LBFGS."""
    return is_torchs(type(optimizer)) and not isinstance(optimizer, torch.optim.LBFGS)


class Evaluations:
    """The user's closure as an optimizer may call it: with unscaled gradients and an unscaled loss."""

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, closure: Closure) -> None:
        self.scaler, self.optimizer, self.closure = scaler, optimizer, closure
        self.unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self.checks_loss = isinstance(optimizer, torch.optim.LBFGS)
        self.first: Any = None
        self._replay = False

    def evaluate(self) -> Any:
        """Loss and scaled gradients by the user's closure.

        Raises:
            RuntimeError: the closure did not scale its loss.
        """
        scaler = self.scaler
        state = scaler._per_optimizer_states[id(self.optimizer)]
        state["stage"] = OptState.READY
        outputs: list[torch.Tensor] = []
        before, scaler._outputs = scaler._outputs, outputs
        try:
            with torch.enable_grad():
                loss = self.closure()
        finally:
            scaler._outputs = before
        if not outputs and scaler._follows_outputs():
            raise RuntimeError(f"the closure did not call scaler.scale(). {_ABOUT}")
        if any(loss is output for output in outputs):
            scale, _ = scaler._check_scale_growth_tracker("step")
            loss = loss.detach() * gradients.to_device(gradients.inverse(scale)[0], loss.device)
        return loss

    def fails(self, loss: Any) -> bool:
        """Unscale what an evaluation gave; whether it is of no use for a step. Asks the device."""
        state = self.scaler._per_optimizer_states[id(self.optimizer)]
        if state["stage"] is OptState.READY:
            self.scaler.unscale_(self.optimizer)
        else:  # by the closure, which may have changed them
            look_again(self.optimizer, state)
        flags = state["found_inf_per_device"]
        number = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if self.checks_loss and flags and number is not None and not math.isfinite(float(number)):
            for flag in flags.values():
                flag.fill_(1.0)
        return bool(flags) and gradients.is_set(list(flags.values()))

    def begin(self) -> None:
        """The first evaluation; it is handed out when the optimizer asks for the first time."""
        self.first = self.evaluate()
        self._replay = True

    def __call__(self) -> Any:
        """What the optimizer calls.

        Raises:
            NotFinite: the evaluation is of no use.
        """
        if self._replay:
            self._replay = False
            return self.first
        loss = self.evaluate()
        if self.unscales and self.fails(loss):
            raise NotFinite
        return loss


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepResult:
    """One step of ``optimizer`` with a closure. If an evaluation is not finite, everything is as before."""
    protocol.check_step(scaler._per_optimizer_states[id(optimizer)]["stage"])
    evaluations = Evaluations(scaler, optimizer, closure)
    evaluations.begin()
    args, kwargs = put_into(args, kwargs, evaluations)
    if evaluates_once(optimizer) or not evaluations.unscales:
        return scaler._step(optimizer, args, kwargs)
    scale, _ = scaler._check_scale_growth_tracker("step")
    used = gradients.snapshot(scale)
    state = scaler._per_optimizer_states[id(optimizer)]
    failed = evaluations.fails(evaluations.first)
    if failed or not state["found_inf_per_device"]:
        return scaler._step(optimizer, args, kwargs)
    measured, before = state.get("measured", ()), Snapshot(optimizer)
    try:
        result = scaler._step(optimizer, args, kwargs)
    except NotFinite:
        before.restore()
        state["refused"] = True
        state["stage"] = OptState.STEPPED
        return scaler._result(optimizer, state, used, None)
    except BaseException:
        before.restore()
        raise
    result._evidence.measured = measured  # type: ignore[attr-defined]
    return result
