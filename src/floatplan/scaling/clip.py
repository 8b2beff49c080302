"""Clipping of unscaled gradients, which leaves what is not finite for the step to see."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from floatplan import _optim
from floatplan.scaling import gradients, protocol
from floatplan.scaling.changed import look_again
from floatplan.scaling.gradients import Batch, Flags, is_dtensor
from floatplan.scaling.measure import Measured, flag_, measure, total_norm

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler

Target = torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor]
"""What is clipped: the gradients of an optimizer, or of parameters."""


def _holder(target: Target) -> tuple[Any, bool]:
    """Something with ``param_groups``, and whether it is an optimizer."""
    if hasattr(target, "param_groups"):
        return target, True
    params = [target] if isinstance(target, torch.Tensor) else list(target)
    return SimpleNamespace(param_groups=[{"params": params}]), False


def _of_optimizer(scaler: GradScaler, optimizer: Any) -> tuple[list[Batch], Measured, Flags]:
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is not OptState.UNSCALED:
        scaler.unscale_(optimizer)
    look_again(optimizer, state)
    batches = gradients.collect(optimizer, allow_fp16=True)
    measured: Measured = state.get("changed") or state.get("measured", ())
    if state.get("clipped") or "unscaled" not in state:  # a subclass may unscale in its own way
        measured = measure(batches)
    return batches, measured, state["found_inf_per_device"]


def _of_parameters(scaler: GradScaler, holder: Any, call: str) -> tuple[list[Batch], Measured, Flags]:
    """Unscale what no optimizer was unscaled for, and keep it in mind until the next update."""
    if not scaler._unscales_itself():
        raise RuntimeError(
            f"{type(scaler).__name__} unscales gradients in its own way, which needs an optimizer: call "
            f"{call}(optimizer, ...)"
        )
    scale = scaler._scale_for(holder, call)
    batches = gradients.collect(holder, allow_fp16=False)
    states = scaler._per_optimizer_states.values()
    done = {id(grad) for state in states for grad, _ in state.get("unscaled", ())} | scaler._unscaled.keys()
    flags = gradients.unscale_(batches, *gradients.inverse(scale), done)
    measured = measure(batches)
    flag_(flags, measured)
    for batch in batches:
        for param in batch.params:
            if param.grad is not None and id(param.grad) not in done:
                scaler._unscaled[id(param.grad)] = param.grad
    return batches, measured, flags


def _unscaled(
    scaler: GradScaler, holder: Any, is_optimizer: bool, call: str
) -> tuple[list[Batch], Measured, Flags, torch.device]:
    found = _of_optimizer(scaler, holder) if is_optimizer else _of_parameters(scaler, holder, call)
    device = found[0][0].device if found[0] else torch.device("cpu")
    return *found, device


def _local(batch: Batch) -> list[torch.Tensor]:
    return [grad.to_local() if is_dtensor(grad) else grad for grad in batch.grads]


def _total(batches: list[Batch], measured: Measured, p: float, device: torch.device) -> float | torch.Tensor:
    """The p-norm over all gradients; a float on the CPU."""
    if p == 2.0:
        total = total_norm(measured, device)
    else:
        wide = gradients.widest(device)
        norms = []
        for batch in batches:
            for param, grad in zip(batch.params, batch.grads, strict=True):
                values = grad.full_tensor() if is_dtensor(grad) else grad
                values = values.to(wide)
                if param.is_complex():  # of absolute values, as torch's clipping
                    values = torch.view_as_complex(values)
                one = torch.linalg.vector_norm(values, p)
                norms.append(gradients.to_device(one, device))
        total = torch.linalg.vector_norm(torch.stack(norms), p)
    return total.item() if isinstance(total, torch.Tensor) and device.type == "cpu" else total


@torch.no_grad()
def norm_(scaler: GradScaler, target: Target, max_norm: float, p: float) -> torch.Tensor:
    """See `GradScaler.clip_grad_norm_`."""
    max_norm, p = float(max_norm), float(p)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be below 0, got {max_norm!r}")
    holder, is_optimizer = _holder(target)
    if not scaler.is_enabled():
        params = [param for group in holder.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, p)
    batches, measured, flags, device = _unscaled(scaler, holder, is_optimizer, "clip_grad_norm_")
    if not batches:
        return gradients.number(0.0, device)
    total = _total(batches, measured, p, device)
    bad = gradients.any_flag(flags.values(), device)
    factor: float | torch.Tensor
    if isinstance(total, torch.Tensor):
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0).float().masked_fill(bad != 0, 1.0)
        norm = total.float().masked_fill(bad != 0, math.inf)
    else:
        fine = math.isfinite(total) and not bad.item()
        factor = min(max_norm / (total + 1e-6), 1.0) if fine else 1.0
        norm = gradients.number(
            total if fine and total <= torch.finfo(torch.float32).max else math.inf, device
        )
    if not isinstance(factor, float) or factor < 1.0:
        with protocol.own_writes(scaler._per_optimizer_states.values()):
            for batch in batches:
                here = factor if isinstance(factor, float) else gradients.to_device(factor, batch.device)
                _optim.multiply_(_local(batch), here)
    return norm


def _check_ordered(holder: Any) -> None:
    for group in holder.param_groups:
        for param in group["params"]:
            if isinstance(param, torch.Tensor) and param.grad is not None and param.is_complex():
                raise ValueError(
                    f"clip_grad_value_() got a complex parameter of shape {tuple(param.shape)}: complex "
                    "numbers have no order to clamp in, and torch clamps none. Call clip_grad_norm_() instead"
                )


@torch.no_grad()
def value_(scaler: GradScaler, target: Target, limit: float) -> None:
    """See `GradScaler.clip_grad_value_`."""
    limit = float(limit)
    if not limit >= 0:
        raise ValueError(f"clip_value must not be below 0, got {limit!r}")
    holder, is_optimizer = _holder(target)
    if not scaler.is_enabled():
        params = [param for group in holder.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_value_(params, limit)
        return
    _check_ordered(holder)
    batches, _, flags, device = _unscaled(scaler, holder, is_optimizer, "clip_grad_value_")
    if not batches:
        return
    # Where something is not finite the limit is, too, and nothing is clamped.
    here = gradients.number(limit, device)
    here.masked_fill_(gradients.any_flag(flags.values(), device) != 0, math.inf)
    with protocol.own_writes(scaler._per_optimizer_states.values()):
        for batch in batches:
            most = gradients.to_device(here, batch.device).to(batch.dtype)
            for grad in _local(batch):
                grad.clamp_(-most, most)
