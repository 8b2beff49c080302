"""Memory layout: weights of convolutions in channels_last, and whatever goes with a weight in its strides.

A convolution takes the layout of its weight for its output, whatever that of its input, so that a network
whose convolutions have channels_last weights computes in channels_last from its first one on: nothing has to
be done to inputs, by hooks or otherwise. Shapes, values and names stay, in a ``state_dict`` too.

Torch's fused CPU optimizers go through weight, gradient and state by address and look at no strides: where
those differ they add to one weight what is another's, without a word (torch 2.13). Hence `conform`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.errors import StepError
from floatplan.step.settings import Settings

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the weight's dimensions."""


def to_channels_last(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> int:
    """Give the weights of 2-d and 3-d convolutions, transposed ones too, the layout that fast kernels take.

    In place: parameters stay the same objects, with the same values. Gradients, and what the optimizers keep
    in a weight's shape, follow. Between steps, at any time.

    Left as they are: weights that are computed (parametrised, pruned), not there yet (lazy), of a tensor
    subclass, or whose memory is shared, with another tensor or another process.

    Args:
        models: modules.
        optimizers: over their parameters.

    Returns:
        How many weights have another layout now.

    Raises:
        StepError: as `check`. Nothing has changed then.
    """
    models, optimizers = tuple(models), tuple(optimizers)
    check(models, optimizers)
    changed = [weight for weight in _weights(models) if not _has(weight, FORMATS[weight.dim()])]
    for weight in changed:
        weight.data = weight.data.contiguous(memory_format=FORMATS[weight.dim()])
    _follow(changed, optimizers)
    return len(changed)


def to_contiguous(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> int:
    """Undo `to_channels_last`: weights of convolutions in torch's usual layout. Arguments are the same."""
    models = tuple(models)
    changed = [weight for weight in _weights(models) if not weight.is_contiguous()]
    for weight in changed:
        weight.data = weight.data.contiguous()
    _follow(changed, optimizers)
    return len(changed)


def check(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Whether `to_channels_last` may change the layout of weights.

    Raises:
        StepError: what holds the models or their gradients has settled on strides already.
    """
    models = tuple(models)
    if all(_has(weight, FORMATS[weight.dim()]) for weight in _weights(models)):
        return
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "unshard"):
            raise StepError(
                f"channels_last came after the model was wrapped: {type(module).__name__} keeps gradients in "
                "the strides that weights had by then. Call model.to(memory_format=torch.channels_last) "
                "before you wrap it"
            )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise StepError(
                "channels_last does not go with LBFGS, which needs gradients that view(-1) can flatten; "
                "leave it out, or take another optimizer"
            )


def may_change(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether `check` finds nothing."""
    try:
        check(models, optimizers)
    except StepError:
        return False
    return True


def check_settings(
    settings: Settings, models: tuple[nn.Module, ...], optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    """`check`, where the settings ask for channels_last."""
    if settings.channels_last:
        check(_with_average(settings, models), optimizers)


def apply_settings(
    settings: Settings, models: tuple[nn.Module, ...], optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    """`to_channels_last`, where the settings ask for it."""
    if settings.channels_last:
        to_channels_last(_with_average(settings, models), optimizers)


def _with_average(settings: Settings, models: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The models, and the averaged one, which runs in their place."""
    return (*models, settings.ema) if isinstance(settings.ema, nn.Module) else models


def conform(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give gradients, and optimizer state in a weight's shape, the weight's strides, where they differ.

    They do after a checkpoint of a model in another layout was loaded, or gradients were assigned. Values
    stay the same. Only weights of four dimensions or more have several layouts.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.dim() >= 4:
                    _conform(weight, optimizer)


def fitted(tensor: Tensor, weight: Tensor) -> Tensor:
    """``tensor``, or its values in the strides of ``weight`` where both are dense and of one shape."""
    if (
        tensor.shape != weight.shape
        or tensor.stride() == weight.stride()
        or type(tensor) is not Tensor
        or type(weight) not in (Tensor, nn.Parameter)
    ):
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(
        tensor
    )


def copied(grad: Tensor, weight: Tensor) -> Tensor:
    """A copy of ``grad`` where ``weight`` lies and, if it is dense, in its strides."""
    copy = grad.to(weight.device).clone()
    return fitted(copy, weight) if copy.layout is torch.strided else copy


def _conform(weight: Tensor, optimizer: torch.optim.Optimizer) -> None:
    if weight.grad is not None and weight.grad.layout is torch.strided:
        grad = fitted(weight.grad, weight)
        if grad is not weight.grad:
            weight.grad = grad
    state: dict[str, Any] = getattr(optimizer, "state", {}).get(weight) or {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            state[name] = fitted(value, weight)


def _follow(weights: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    changed = {id(weight) for weight in weights}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) in changed:
                    _conform(weight, optimizer)
    for weight in weights:
        if weight.grad is not None and weight.grad.layout is torch.strided:
            weight.grad = fitted(weight.grad, weight)


def _has(weight: Tensor, layout: torch.memory_format) -> bool:
    return weight.is_contiguous(memory_format=layout)


def _weights(models: tuple[nn.Module, ...]) -> Iterator[nn.Parameter]:
    """Those whose layout is nobody else's business, each once."""
    tensors = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    uses = Counter(_memory(tensor) for tensor in tensors.values() if _is_plain(tensor))
    seen: set[int] = set()
    for module in (module for model in models for module in model.modules()):
        weight = module._parameters.get("weight") if isinstance(module, CONVOLUTIONS) else None
        if weight is None or id(weight) in seen or not _is_plain(weight) or weight.dim() not in FORMATS:
            continue
        seen.add(id(weight))
        is_whole = weight.untyped_storage().nbytes() == weight.nbytes
        is_of_processes = weight.device.type == "cpu" and weight.untyped_storage().is_shared()
        if is_whole and not is_of_processes and uses[_memory(weight)] == 1:
            yield weight


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _memory(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()
