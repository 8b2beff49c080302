"""Scaled gradients without an optimizer: lists of them, and gradients that are differentiated again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import OptState

from floatplan.scaling import gradients

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler

_MOST_IN_FLOAT16 = 2.0**14
"""A scale is itself a gradient, that of a scaled output: 65536 is infinite in float16."""


def _times(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    wide = grad.coalesce() if grad.is_sparse else grad
    wide = wide.to(torch.promote_types(grad.dtype, torch.float32))
    return wide * gradients.to_device(factor, grad.device)


def unscale(
    scaler: GradScaler, grads: Iterable[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """See `GradScaler.unscale`."""
    given = list(grads)
    if not scaler.is_enabled():
        return given, torch.zeros((), dtype=torch.bool, device="cpu")
    scale, _ = scaler._check_scale_growth_tracker("unscale")
    factor, useless = gradients.inverse(scale)
    results = [None if grad is None else _times(grad, factor) for grad in given]
    with torch.no_grad():
        found = [
            gradients.to_device(torch.isfinite(gradients.dense_values(one)).all().logical_not(), scale.device)
            for one in results
            if one is not None
        ]
        flag = torch.stack([useless != 0, *found]).any()
    state = scaler._per_optimizer_states[id(flag)]
    # The flag is kept, so that no optimizer has its id.
    state.update(stage=OptState.STEPPED, found_inf_per_device={scale.device: flag.float()}, flag=flag)
    return results, flag


def _grad_outputs(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], scale: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients at the outputs, times the scale; None where torch must complain."""
    scaled: list[torch.Tensor | None] = []
    for output, grad in zip(outputs, given, strict=True):
        factor = gradients.to_device(scale, output.device)
        if grad is not None:
            scaled.append(grad * factor.to(grad.dtype))
        elif output.numel() == 1:
            scaled.append(factor.to(output.dtype).expand_as(output))
        else:
            scaled.append(None)
    return scaled


def grad(
    scaler: GradScaler,
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None,
    create_graph: bool,
    retain_graph: bool | None,
    allow_unused: bool,
) -> tuple[torch.Tensor | None, ...]:
    """See `GradScaler.grad`."""
    outs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if grad_outputs is None:
        given: list[torch.Tensor | None] = [None] * len(outs)
    else:
        given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs)
    device = outs[0].device
    if scaler.is_enabled():
        scale = gradients.to_device(scaler._made_on(device), device)
        if any(out.dtype is torch.float16 for out in outs):
            scale = scale.clamp(max=_MOST_IN_FLOAT16)
        factor, _ = gradients.inverse(scale)
    else:
        scale = factor = gradients.number(1.0, device)
    found = torch.autograd.grad(
        outs,
        inputs,
        _grad_outputs(outs, given, scale),
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
    )
    return tuple(None if one is None else _times(one, factor) for one in found)
