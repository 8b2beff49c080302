"""The gradients of one optimizer: collected by device and dtype, and unscaled where they lie."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from floatplan import _optim
from floatplan.formats import FORMATS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Flags = dict[torch.device, torch.Tensor]
"""One 0-dim float32 tensor per device that holds gradients: not 0 if something there is not finite."""


_MOST = FORMATS["fp32"].max
_LOW = frozenset((torch.float16, torch.bfloat16))


@dataclass(slots=True)
class Batch:
    """Gradients that one kernel can take: one device, one dtype and, for DTensors, one mesh and layout.

    Attributes:
        device: where they lie.
        dtype: of the gradients; of complex ones, that of their parts.
        layout: mesh and placements of DTensors; else empty.
        grads: the gradients; of a sparse one, its values; of a complex one, a view of its parts.
        params: the parameter of each.
        positions: place of each parameter among all parameters of the optimizer.
        is_plain: there is one for every parameter, each a dense float32 tensor on the CPU, of no class of
            its own.
    """

    device: torch.device
    dtype: torch.dtype
    layout: tuple[object, ...]
    grads: list[torch.Tensor] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    is_plain: bool = False


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor. Does not import them: that is slow, and then there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _values(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient.

    Values of an index that stands twice are added first: the sum is what reaches the weight, it may
    overflow where its parts do not, and a norm over the parts is not the norm of the gradient.
    """
    if not grad.is_coalesced():
        grad = grad.coalesce()
        param.grad = grad
    return grad._values()


def _parts(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The parts of a complex gradient, in its own memory: kernels and formats know real numbers.

    One that is only marked as conjugate or negative is computed first, into ``param.grad``.
    """
    if grad.is_sparse:
        return torch.view_as_real(_values(param, grad))
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return torch.view_as_real(grad)


_FLOAT32, _STRIDED, _CPU = torch.float32, torch.strided, torch.device("cpu")


def are_plain(tensors: Iterable[object]) -> TypeGuard[list[torch.Tensor]]:
    """Whether all are dense float32 tensors on the CPU, of no class of their own."""
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor
            or tensor.dtype is not _FLOAT32
            or tensor.layout is not _STRIDED
            or not tensor.is_cpu
        ):
            return False
    return True


def collect(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Batch]:
    """Every gradient of ``optimizer``, in batches that one kernel can take.

    Nothing is unscaled here, so that after an error all gradients are still as they were.

    Raises:
        ValueError: a float16 gradient, unless ``allow_fp16``.
        AssertionError: something in ``param_groups`` is not a tensor.
    """
    groups = optimizer.param_groups
    params = groups[0]["params"] if len(groups) == 1 else list(_parameters(optimizer))
    try:
        grads = [param.grad for param in params]
    except AttributeError:  # of what is no tensor
        return _batches(optimizer, allow_fp16)
    if grads and are_plain(grads):
        return [Batch(_CPU, _FLOAT32, (), grads, params, list(range(len(params))), is_plain=True)]
    return _batches(optimizer, allow_fp16)


def _batches(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Batch]:
    """`collect`, of gradients of any kind."""
    batches: dict[tuple[object, ...], Batch] = {}
    batch: Batch | None = None  # of the parameter before, which is mostly the one of the next
    refused: list[tuple[int, torch.Size]] = []
    for position, param in enumerate(_parameters(optimizer)):
        if not isinstance(param, torch.Tensor):
            raise AssertionError(
                f"parameter {position} of {type(optimizer).__name__} is a {type(param).__name__}, "
                "not a tensor; pass tensors in param_groups[...]['params']"
            )
        found = param.grad
        if found is None:
            continue
        device, stored = found.device, found.dtype
        dtype = stored.to_real() if stored.is_complex else stored
        if dtype is torch.float16 and not allow_fp16:
            refused.append((position, param.shape))
            continue
        if dtype is not stored:
            grad = _parts(param, found)
        else:
            grad = _values(param, found) if found.is_sparse else found
        layout: tuple[object, ...] = ()
        if type(grad) is not torch.Tensor and is_dtensor(grad):
            layout = (grad.device_mesh, grad.placements)
        if batch is None or dtype is not batch.dtype or device != batch.device or layout != batch.layout:
            batch = batches.setdefault((device, dtype, layout), Batch(device, dtype, layout))
        batch.grads.append(grad)
        batch.params.append(param)
        batch.positions.append(position)
    if refused:
        names = parameter_names(optimizer)
        first = ", ".join(name_at(names, position, shape) for position, shape in refused[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise ValueError(
            f"unscale_() got float16 gradients, of {first}{more}. Scaled back in float16, small ones become "
            "0 again. Keep trainable weights in float32 (fp.upcast_trainable(model), before the optimizer is "
            "made) and let autocast cast them."
        )
    return list(batches.values())


def cpu_kernel_loses_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused CPU optimizer would round the scale before it divides by it.

    Its kernel casts the scale to the gradient's dtype: in float16 a scale of 65536 becomes inf, and every
    gradient 0 without a word (torch 2.13). Kernels of accelerators divide in float32.
    """
    # Something that is no tensor is for collect() to complain about.
    grads = [getattr(param, "grad", None) for param in _parameters(optimizer)]
    dtypes = {grad.dtype for grad in grads if grad is not None}
    if _LOW.isdisjoint(dtypes):
        return False
    return any(grad is not None and grad.dtype in _LOW and grad.device.type == "cpu" for grad in grads)


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a coalesced sparse tensor; a dense one itself."""
    return tensor._values() if tensor.is_sparse else tensor


def some_device(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Where a gradient lies; None if there is none."""
    return next((param.grad.device for param in _parameters(optimizer) if param.grad is not None), None)


def to_device(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """``tensor`` on ``device``. Waits only towards the CPU, where reading before arrival would be wrong."""
    return tensor.to(device=device, non_blocking=device.type != "cpu", copy=copy)


def widest(device: torch.device) -> torch.dtype:
    """float64 where ``device`` has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def number(value: float, device: torch.device) -> torch.Tensor:
    """``value`` as a fresh 0-dim float32 tensor on ``device``."""
    return torch.full((), value, dtype=torch.float32, device=device)


def snapshot(tensor: torch.Tensor) -> float | torch.Tensor:
    """What a 0-dim tensor holds now: a float where the host may ask for free, else a copy."""
    return tensor.item() if tensor.device.type == "cpu" else tensor.clone()


def is_useless(scale: float) -> bool:
    """Whether 1/scale is 0 or not finite in float32."""
    return scale == 0 or not math.isfinite(scale) or abs(1 / scale) > _MOST


def unusable(factor: torch.Tensor) -> torch.Tensor:
    """0-dim bool: ``factor`` is 0 or not finite. The host is not asked."""
    return (torch.isfinite(factor) & (factor != 0)).logical_not()


def inverse(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1/scale, 1.0 if that is of no use else 0.0), both 0-dim float32 on the scale's device.

    The division is done in float64 and rounded once. An inverse that is 0 or not finite is replaced by 1:
    the step is refused anyway, and the gradients are not filled with NaN.
    """
    if scale.device.type == "cpu":  # the same, without six small kernels
        value = scale.item()
        refused = is_useless(value)
        return number(1.0 if refused else 1.0 / value, scale.device), number(refused, scale.device)
    wide = scale if scale.device.type == "mps" else scale.double()
    inv_scale = wide.reciprocal().float()
    useless = unusable(inv_scale)
    return inv_scale.masked_fill(useless, 1.0), useless.float()


def unscale_(
    batches: Iterable[Batch],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    done: Container[int] = (),
) -> Flags:
    """Multiply every gradient by ``inv_scale``; one flag per device, which starts as ``found_inf``.

    Gradients whose ``id()`` is in ``done`` are unscaled already and are left alone.

    A factor of 1 that lies on the CPU costs no pass over the gradients: what is not finite is found by
    ``measure``, which follows in any case.
    """
    flags: Flags = {}
    nothing_to_do = inv_scale.device.type == "cpu" and inv_scale.item() == 1.0
    for batch in batches:
        flag = flags.get(batch.device)
        if flag is None:
            flag = flags[batch.device] = to_device(found_inf, batch.device, copy=True)
        if nothing_to_do:
            continue
        factor = to_device(inv_scale, batch.device)
        grads = batch.grads
        if done:
            pairs = zip(batch.params, grads, strict=True)
            grads = [grad for param, grad in pairs if id(param.grad) not in done]
            if not grads:
                continue
        if batch.dtype is torch.bfloat16 and batch.device.type != "cpu":
            # The kernel is not made for bfloat16 there. One gradient at a time goes through float32,
            # so that the product is rounded once and the memory grows by one gradient.
            for grad in grads:
                wide = grad.float()
                _optim.check_and_unscale_([wide], flag, factor)
                grad.copy_(wide)
        else:
            _optim.check_and_unscale_(grads, flag, factor)
    return flags


def any_flag(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1.0 if any of ``flags`` is set, else 0.0: a fresh 0-dim float32 tensor on ``device``.

    Never more than 1: fused kernels compare the flag with 1, and a sum of 2 makes them step (torch 2.13).
    """
    if device.type == "cpu":
        return number(any(flag.item() for flag in flags), device)
    here = [to_device(flag.reshape(()), device) for flag in flags]
    if not here:
        return number(0.0, device)
    if len(here) == 1:
        return (here[0] != 0).float()
    return (torch.stack(here) != 0).any().float()


def is_set(flags: Sequence[torch.Tensor]) -> bool:
    """Whether any of ``flags`` is set. One sync, on however many devices they lie."""
    flag = flags[0] if len(flags) == 1 else any_flag(flags, flags[0].device)
    return bool(flag.item())


ParameterNames = tuple[tuple[tuple[str, ...], int], ...]


def parameter_names(optimizer: torch.optim.Optimizer) -> ParameterNames:
    """(names, number of parameters) of each group. Holds no parameter.

    There may be no names, or too few: parameters can be added to a group by hand.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    return tuple((tuple(group.get("param_names") or ()), len(group["params"])) for group in groups)


def name_at(names: ParameterNames, position: int, shape: torch.Size) -> str:
    """Name of the parameter at ``position``, or where it stands and its shape. Always has an answer."""
    for index, (known, count) in enumerate(names):
        if position < count:
            if position < len(known):
                return str(known[position])
            return f"param_groups[{index}]['params'][{position}] of shape {tuple(shape)}"
        position -= count
    return f"a parameter of shape {tuple(shape)}"
