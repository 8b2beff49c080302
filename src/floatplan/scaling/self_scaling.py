"""Optimizers that divide by the scale inside their own kernel: torch's fused ones.

They say so by ``_step_supports_amp_scaling``, and read two attributes that the scaler lends them for one
step: ``grad_scale``, the divisor or None, and ``found_inf``, a flag at which the kernel writes nothing.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from floatplan import _optim
from floatplan.scaling import fused, gradients
from floatplan.scaling.measure import divided, flag_, measure, total_is_enough
from floatplan.scaling.written import bound

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler


_takes_scaler: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``step`` has a ``grad_scaler`` argument: the older contract, where it does everything."""
    called: Any = optimizer.step
    function: Any = getattr(called, "__func__", called)
    if function is getattr(type(optimizer), "step", None):
        return _class_takes_scaler(function)
    if not isinstance(function, FunctionType):
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    known = _takes_scaler.get(function)
    if known is None:  # to look at a signature takes longer than a small step
        known = _takes_scaler[function] = "grad_scaler" in inspect.signature(optimizer.step).parameters
    return known


@cache
def _class_takes_scaler(function: Any) -> bool:
    return "grad_scaler" in inspect.signature(function).parameters


def own_grad_scale(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """A further divisor that the user has put on the optimizer; a 0-dim tensor."""
    divisor: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    return divisor


@contextmanager
def lent(
    optimizer: torch.optim.Optimizer, divisor: torch.Tensor | None, found_inf: torch.Tensor
) -> Iterator[None]:
    """The two attributes, for one step; a divisor that the user had put there is used up by it."""
    holder: Any = optimizer
    holder.grad_scale = divisor
    holder.found_inf = found_inf
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            with suppress(AttributeError):  # the weights are stepped: too late to fail
                delattr(holder, name)


def makes_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the coming step of an SGD makes a momentum buffer.

    Its fused form takes unset memory for one and relies on the kernel to fill it, which the kernel does
    not do at a set flag: the next step then adds that memory to the weights (torch 2.13).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for param in group["params"]
    )


def must_be_asked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step at a set flag does more than nothing: hooks would run, or a buffer stay unset."""
    return _optim.has_step_hooks(optimizer) or makes_momentum(optimizer)


def divides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel divides gradients by what it is `lent`, and by nothing that the user put there."""
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and not takes_scaler(optimizer)
        and own_grad_scale(optimizer) is None
    )


def flag_useless(flags: gradients.Flags, divisor: float | torch.Tensor) -> None:
    """Set every flag if 1/divisor is 0 or not finite. A tensor is 0-dim."""
    if not isinstance(divisor, torch.Tensor) or divisor.device.type == "cpu":
        if gradients.is_useless(float(divisor)):
            for flag in flags.values():
                flag.fill_(1.0)
        return
    useless = gradients.unusable(divisor.reciprocal())
    for device, flag in flags.items():
        flag.masked_fill_(gradients.to_device(useless, device), 1.0)


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step ``optimizer``, which unscales by itself; ``state`` is what ``scaler`` holds of it."""
    if takes_scaler(optimizer):
        return optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    scale = scaler._get_scale_async()
    assert scale is not None
    divisor = own_grad_scale(optimizer)
    if state["stage"] is OptState.READY:
        if scaler._unscaled or gradients.cpu_kernel_loses_scale(optimizer):
            scaler._unscale_and_record(optimizer, *gradients.inverse(scale), True, bound(optimizer))
        else:
            scaler._check_inf_per_device(optimizer)
            divisor = scale if divisor is None else scale * divisor
    flags = state["found_inf_per_device"]
    if not flags:
        return None
    if divisor is not None:
        limit = state["bound"] = bound(optimizer)
        for name in ("measured", "changed"):
            measured = state.get(name, ())
            if not total_is_enough(measured, divisor, limit):
                measured = measure(gradients.collect(optimizer, allow_fp16=True), each=True)
            state[name] = divided(measured, divisor, limit)
            flag_(flags, state[name])
        flag_useless(flags, divisor)
    if scaler._note_fault(optimizer, state):
        return None
    refused = state["refused"] = gradients.any_flag(flags.values(), scale.device)
    is_here = refused.device.type == "cpu"
    if is_here and not (args or kwargs) and not refused.item():
        batches = gradients.collect(optimizer, allow_fp16=True)
        if fused.step(optimizer, batches, divisor):
            return None
    with lent(optimizer, divisor, refused):
        # On the CPU to ask is free. Elsewhere the kernel looks at the flag itself.
        if (is_here or must_be_asked(optimizer)) and refused.item():
            return None
        return optimizer.step(*args, **kwargs)
