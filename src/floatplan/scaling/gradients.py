"""The gradients of one optimizer: collected by device and dtype, and unscaled where they lie."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from floatplan import _torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Flags = dict[torch.device, torch.Tensor]
"""One 0-dim float32 tensor per device that holds gradients: not 0 if something there is not finite."""


@dataclass(slots=True)
class Batch:
    """Gradients that one kernel can take: one device, one dtype and, for DTensors, one mesh and layout.

    Attributes:
        device: where they lie.
        dtype: of the gradients.
        grads: the gradients; of a sparse one, its values.
        positions: place of each parameter among all parameters of the optimizer.
        shapes: shape of each parameter.
    """

    device: torch.device
    dtype: torch.dtype
    grads: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor. Does not import them: that is slow, and then there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(position, parameter, gradient) of each parameter that has a gradient."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    for position, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise AssertionError(
                f"parameter {position} of {type(optimizer).__name__} is a {type(param).__name__}, "
                "not a tensor; pass tensors in param_groups[...]['params']"
            )
        if param.grad is not None:
            yield position, param, param.grad


def _dense(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, or the values of a sparse one.

    Values of an index that stands twice are added first: the sum is what reaches the weight, it may
    overflow where its parts do not, and a norm over the parts is not the norm of the gradient.
    """
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        grad = grad.coalesce()
        param.grad = grad
    return grad._values()


def collect(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Batch]:
    """Every gradient of ``optimizer``, in batches that one kernel can take.

    Nothing is unscaled here, so that after an error all gradients are still as they were.

    Raises:
        ValueError: a float16 gradient, unless ``allow_fp16``.
        AssertionError: something in ``param_groups`` is not a tensor.
    """
    batches: dict[tuple[object, ...], Batch] = {}
    refused: list[tuple[int, torch.Size]] = []
    for position, param, found in _with_gradients(optimizer):
        if found.dtype is torch.float16 and not allow_fp16:
            refused.append((position, param.shape))
            continue
        grad = _dense(param, found)
        layout = (grad.device_mesh, grad.placements) if is_dtensor(grad) else ()
        key = (grad.device, grad.dtype, *layout)
        batch = batches.get(key)
        if batch is None:
            batch = batches[key] = Batch(grad.device, grad.dtype)
        batch.grads.append(grad)
        batch.positions.append(position)
        batch.shapes.append(param.shape)
    if refused:
        names = parameter_names(optimizer)
        first = ", ".join(name_at(names, position, shape) for position, shape in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise ValueError(
            f"unscale_() got float16 gradients, of {first}{more}. Scaled back in float16, small ones become "
            "0 again. Keep the weights in float32 (model.float()) and let autocast cast them."
        )
    return list(batches.values())


def cpu_kernel_loses_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused CPU optimizer would round the scale before it divides by it.

    Its kernel casts the scale to the gradient's dtype: in float16 a scale of 65536 becomes inf, and every
    gradient 0 without a word (torch 2.13). Kernels of accelerators divide in float32.
    """
    return any(
        grad.device.type == "cpu" and grad.dtype in (torch.float16, torch.bfloat16)
        for _, _, grad in _with_gradients(optimizer)
    )


def to_device(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """``tensor`` on ``device``. Waits only towards the CPU, where reading before arrival would be wrong."""
    return tensor.to(device=device, non_blocking=device.type != "cpu", copy=copy)


class Replicas:
    """Copies of one small tensor, made when a device first asks for its own."""

    def __init__(self, master: torch.Tensor) -> None:
        self._master = master
        self.copies: Flags = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The copy on ``device``."""
        copy = self.copies.get(device)
        if copy is None:
            copy = self.copies[device] = to_device(self._master, device, copy=True)
        return copy


def inverse(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1/scale, 1.0 if that is of no use else 0.0), both 0-dim float32 on the scale's device.

    The division is done in float64 and rounded once. An inverse that is 0 or not finite is replaced by 1:
    the step is refused anyway, and the gradients are not filled with NaN.
    """
    if scale.device.type == "cpu" and (value := scale.item()):  # the same, without six small kernels
        inv_scale = torch.tensor(1.0 / value, dtype=torch.float32)
        if math.isfinite(inv_scale.item()) and inv_scale.item():
            return inv_scale, torch.tensor(0.0)
    wide = scale if scale.device.type == "mps" else scale.double()
    inv_scale = wide.reciprocal().float()
    useless = usable(inv_scale).logical_not()
    return inv_scale.masked_fill(useless, 1.0), useless.float()


def usable(factor: torch.Tensor) -> torch.Tensor:
    """0-dim bool: ``factor`` is finite and not 0."""
    return torch.isfinite(factor) & (factor != 0)


def unscale_(batches: Iterable[Batch], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> Flags:
    """Multiply every gradient by ``inv_scale``; one flag per device, which starts as ``found_inf``.

    A factor of 1 that lies on the CPU costs no pass over the gradients: what is not finite is found by
    ``measure``, which follows in any case.
    """
    factors, flags = Replicas(inv_scale), Replicas(found_inf)
    nothing_to_do = inv_scale.device.type == "cpu" and inv_scale.item() == 1.0
    for batch in batches:
        flag = flags.on(batch.device)
        if nothing_to_do:
            continue
        factor = factors.on(batch.device)
        if batch.dtype is torch.bfloat16 and batch.device.type != "cpu":
            # The kernel is not made for bfloat16 there. One gradient at a time goes through float32,
            # so that the product is rounded once and the memory grows by one gradient.
            for grad in batch.grads:
                wide = grad.float()
                _torch.check_and_unscale_([wide], flag, factor)
                grad.copy_(wide)
        else:
            _torch.check_and_unscale_(batch.grads, flag, factor)
    return flags.copies


def any_flag(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1.0 if any of ``flags`` is set, else 0.0: a fresh 0-dim float32 tensor on ``device``.

    Never more than 1: fused kernels compare the flag with 1, and a sum of 2 makes them step (torch 2.13).
    """
    here = [to_device(flag.reshape(()), device) for flag in flags]
    if not here:
        return torch.zeros((), dtype=torch.float32, device=device)
    if len(here) == 1:
        return (here[0] != 0).float()
    return (torch.stack(here) != 0).any().float()


def is_set(flags: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``flags`` is set. One sync, on however many devices they lie."""
    flag = flags[0] if len(flags) == 1 else any_flag(flags, flags[0].device)
    return bool(flag.item())


ParameterNames = tuple[tuple[list[str] | None, int], ...]


def parameter_names(optimizer: torch.optim.Optimizer) -> ParameterNames:
    """(names or None, number of parameters) of each group. Holds no parameter."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return tuple((group.get("param_names"), len(group["params"])) for group in groups)


def name_at(names: ParameterNames, position: int, shape: torch.Size) -> str:
    """Name of the parameter at ``position``, or where it stands and its shape."""
    for index, (known, count) in enumerate(names):
        if position < count:
            if known is not None:
                return known[position]
            return f"param_groups[{index}]['params'][{position}] of shape {tuple(shape)}"
        position -= count
    raise IndexError(f"no parameter {position} beyond the last group")
