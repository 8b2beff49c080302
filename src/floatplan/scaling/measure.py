"""Norms of gradients, and which of them are not finite: one pass gives both.

A norm added up in float64 is finite exactly when every value of a float32 gradient is finite, since the
square of the largest float32 (1e77) is far from the end of float64.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from floatplan import _optim
from floatplan.formats import FORMATS
from floatplan.scaling.gradients import Batch, Flags, is_dtensor, number, to_device, unscale_, widest
from floatplan.scaling.written import NO_BOUND, Bound


@dataclass(frozen=True, slots=True)
class Part:
    """What was measured on one batch of n gradients; its tensors belong to it alone.

    Attributes:
        positions: place of each parameter among all parameters of the optimizer.
        shapes: shape of each parameter.
        norms: L2 norm of each gradient, shape (n,), float64 (float32 on devices without it).
        sizes: what is held against the bound, shape (n,): norms, or largest values where norms say little.
        finite: whether every value of each gradient is finite, shape (n,), bool.
        fits: whether, moreover, what an optimizer makes of it is finite, shape (n,), bool.
        dtype: of the gradients.
    """

    positions: list[int]
    shapes: list[torch.Size]
    norms: torch.Tensor
    sizes: torch.Tensor
    finite: torch.Tensor
    fits: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Total:
    """What was measured on one batch on the CPU in which every value is finite: the host knows it all.

    Attributes:
        device: where the gradients lie.
        norm: L2 norm over all of them.
        dtype: of the gradients.
    """

    device: torch.device
    norm: float
    dtype: torch.dtype


Measured = tuple[Part | Total, ...]


def _peaks(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest absolute value of each tensor, shape (n,); not finite if a value is not."""
    return torch.stack(
        [tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
    )


_SQUARES_ARE_LOST = 2.0**-50
"""Norms below this, added up in float32, lack the squares of small values: 1e-24 squared is 0 there."""

_LEAST_OF_FLOAT32, _MOST_OF_FLOAT32 = FORMATS["fp32"].smallest_normal, FORMATS["fp32"].max
_ROW = 4096
_SMALL, _TOGETHER = 4096, 32
_RUN = 2**17


def _shortened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the same norm: the norms of rows of 4096 values where there are many values.

    One long sum of squares in float32 on the CPU is 0.07 % too small at 16 million values, and takes twice
    as long (torch 2.13).
    """
    if tensor.numel() < 16 * _ROW:
        return tensor
    is_plain = tensor.is_contiguous() or tensor.dim() not in (4, 5)
    ordered = tensor if is_plain else tensor.movedim(1, -1)  # as channels_last lies in memory
    if not ordered.is_contiguous():
        return tensor
    flat = ordered.view(-1)
    whole = flat.numel() - flat.numel() % _ROW
    norms: torch.Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    return torch.cat([norms, flat[whole:]])


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All values in runs that fit a cache: some small tensors, or a part of a large one."""
    small: list[torch.Tensor] = []
    for tensor in tensors:
        size = tensor.numel()
        if size <= _SMALL:
            small.append(tensor)
        elif not tensor.is_contiguous():
            yield [tensor]
        elif size <= _RUN:
            yield [tensor.view(-1)]
        else:
            yield from ([part] for part in torch.split(tensor.view(-1), _RUN))
    for at in range(0, len(small), _TOGETHER):
        yield small[at : at + _TOGETHER]


def _square(run: list[torch.Tensor]) -> float:
    """Sum of squares of a run of float32 values on the CPU.

    To call a kernel for a small tensor takes longer than to copy it, and a norm twice as long as a product.
    """
    flat = run[0]
    if len(run) > 1 or flat.dim() != 1:
        if not flat.is_contiguous() and len(run) == 1:
            return float(torch.linalg.vector_norm(flat).item()) ** 2
        flat = _optim.flat(run)
    return torch.dot(flat, flat).item()


def _norm_here(batch: Batch, inv_scale: torch.Tensor | None = None, found_inf: Any = None) -> float:
    """Norm of all gradients in float32 on the CPU; if it is finite, they are. See `_total_on_cpu`.

    With ``inv_scale`` they are multiplied by it first, each run while the cache holds it.
    """
    square = 0.0
    for run in _runs(batch.grads):
        if inv_scale is not None:
            _optim.check_and_unscale_(run, found_inf, inv_scale)
        square += _square(run)
    norm = math.sqrt(square)
    return _norm_in_float64(batch) if norm < _SQUARES_ARE_LOST else norm


def _norm_in_float64(batch: Batch) -> float:
    return math.hypot(*_optim.norms(batch.grads, torch.float64).tolist())


def _total_on_cpu(batch: Batch) -> float:
    """Norm of all gradients; if it is finite, they are. It may not be where they are, only very large."""
    if batch.dtype is torch.float32:
        return _norm_here(batch)
    wide = torch.promote_types(batch.dtype, torch.float32)
    pieces = [run[0] if len(run) == 1 else _optim.flat(run) for run in _runs(batch.grads)]
    norm = math.hypot(*_optim.norms(pieces, wide).tolist())
    return _norm_in_float64(batch) if norm < _SQUARES_ARE_LOST and wide is torch.float32 else norm


def _measure_on_cpu(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms in float32, which is cheap; the exact answer only when one is not finite, which is rare."""
    wide = torch.promote_types(dtype, torch.float32)
    norms = _optim.norms([_shortened(tensor, wide) for tensor in tensors], wide).double()
    finite = torch.isfinite(norms)
    if finite.all():
        small = norms < _SQUARES_ARE_LOST
        if wide is torch.float32 and small.any():
            again = [tensors[place] for place in small.nonzero().flatten().tolist()]
            norms[small] = _optim.norms(again, torch.float64)
        return norms, finite
    return _optim.norms(tensors, torch.float64), torch.isfinite(_peaks(tensors))


def _measure(tensors: list[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(norms, finite) of the tensors of one batch, without waiting for an accelerator."""
    if batch.device.type == "cpu":
        return _measure_on_cpu(tensors, batch.dtype)
    if batch.device.type == "mps":  # has no float64
        return _optim.norms(tensors, torch.float32), torch.isfinite(_peaks(tensors))
    norms = _optim.norms(tensors, torch.float64)
    if batch.dtype is torch.float64:
        return norms, torch.isfinite(_peaks(tensors))
    return norms, torch.isfinite(norms)


def _measure_dtensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(norms, finite) of whole gradients whose shards lie on several ranks; the same on every rank."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = [grad for grad in batch.grads if is_dtensor(grad)]
    mesh, placements = whole[0].device_mesh, whole[0].placements
    if any(placement.is_partial() for placement in placements):
        return _measure([grad.full_tensor() for grad in whole], batch)
    norms, finite = _measure([grad.to_local() for grad in whole], batch)
    local = torch.stack([norms.square(), finite.logical_not().to(norms.dtype)])
    shares = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    total = DTensor.from_local(local, mesh, shares, run_check=False).full_tensor()
    return total[0].sqrt(), total[1] == 0


@cache
def _limit(dtype: torch.dtype) -> float:
    """Largest value in which an optimizer computes with gradients in ``dtype``."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).max


def _part(batch: Batch, bound: Bound) -> Part:
    whole = is_dtensor(batch.grads[0])
    norms, finite = _measure_dtensors(batch) if whole else _measure(batch.grads, batch)
    sizes = norms
    # A norm above 256 is nothing unusual, and a value of 256 has no square in float16. The norm of finite
    # values of float64 may be inf.
    norms_say_little = batch.dtype is torch.float16 or (batch.dtype is torch.float64 and not bound.squares)
    if norms_say_little and bound is not NO_BOUND and not whole:
        sizes = _peaks(batch.grads).to(norms.dtype)
    fits = finite & (sizes <= bound.of(batch.dtype)) if bound is not NO_BOUND else finite
    shapes = [param.shape for param in batch.params]
    return Part(batch.positions, shapes, norms, sizes, finite, fits, batch.dtype)


def measure(batches: Iterable[Batch], bound: Bound = NO_BOUND, each: bool = False) -> Measured:
    """Norms and finiteness, one read of each gradient. No device-to-host sync.

    Args:
        batches: the gradients.
        bound: what the optimizer can take of them as they are.
        each: whether the norm of each gradient is wanted, also where a total says that all are finite.
    """
    parts: list[Part | Total] = []
    for batch in batches:
        if batch.device.type == "cpu" and not (each or is_dtensor(batch.grads[0])):
            norm = _total_on_cpu(batch)
            if math.isfinite(norm) and (bound is NO_BOUND or norm <= bound.of(batch.dtype)):
                parts.append(Total(batch.device, norm, batch.dtype))
                continue
        parts.append(_part(batch, bound))
    return tuple(parts)


def _quotient(total: Total, divisor: float | torch.Tensor) -> float:
    value = divisor.item() if isinstance(divisor, torch.Tensor) else divisor
    return total.norm / value if value else math.inf


def total_is_enough(measured: Measured, divisor: float | torch.Tensor, bound: Bound) -> bool:
    """Whether no gradient can fail in ``divided``: none has a larger norm than a total that fits."""
    return all(
        _quotient(part, divisor) <= min(_limit(part.dtype), bound.of(part.dtype))  # False for NaN, too
        for part in measured
        if isinstance(part, Total)
    )


def divided(measured: Measured, divisor: float | torch.Tensor, bound: Bound) -> Measured:
    """What ``measured`` becomes when an optimizer divides its gradients by ``divisor`` (a tensor is 0-dim).

    A gradient whose norm would pass the largest value counts as not finite. This is stricter than value
    by value, and costs no further pass over the gradients.
    """
    parts: list[Part | Total] = []
    for part in measured:
        if isinstance(part, Total):
            parts.append(Total(part.device, _quotient(part, divisor), part.dtype))
            continue
        by = divisor.to(part.norms) if isinstance(divisor, torch.Tensor) else divisor
        norms = part.norms / by
        sizes = norms if part.sizes is part.norms else part.sizes / by
        # False for NaN, too.
        finite = part.finite & (norms <= _limit(part.dtype))
        fits = finite & (sizes <= bound.of(part.dtype))
        parts.append(Part(part.positions, part.shapes, norms, sizes, finite, fits, part.dtype))
    return tuple(parts)


def fine_total(batches: Sequence[Batch], divisor: float, bound: Bound) -> Total | None:
    """What `measured_divided` says where one number tells that all is fine, as nearly always on the CPU.

    None where gradients lie elsewhere or in several formats, or may not be fine.
    """
    if len(batches) != 1 or not batches[0].is_plain or not _LEAST_OF_FLOAT32 <= divisor <= _MOST_OF_FLOAT32:
        return None
    batch = batches[0]
    norm = _norm_here(batch) / divisor
    # False for NaN, too.
    if norm <= _MOST_OF_FLOAT32 and norm <= bound.of(batch.dtype):
        return Total(batch.device, norm, batch.dtype)
    return None


def measured_divided(batches: Sequence[Batch], divisor: float | torch.Tensor, bound: Bound) -> Measured:
    """What is measured on gradients that an optimizer divides by ``divisor`` in its own kernel."""
    measured = measure(batches)
    if not total_is_enough(measured, divisor, bound):
        measured = measure(batches, each=True)
    return divided(measured, divisor, bound)


def flag_(flags: Flags, measured: Measured) -> None:
    """Set the flag of each device on which a gradient, or what an optimizer makes of it, is not finite."""
    for part in measured:
        if isinstance(part, Total):
            if part.device not in flags:
                flags[part.device] = number(0.0, part.device)
            continue
        bad = part.fits.all().logical_not()
        flag = flags.get(part.fits.device)
        if flag is None:
            flags[part.fits.device] = bad.float()
        else:
            flag.masked_fill_(bad, 1.0)


def unscaled(
    batches: Sequence[Batch],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    done: Container[int],
    bound: Bound,
) -> tuple[Flags, Measured]:
    """`unscale_` with the same arguments, and what `measure` says then; the flags are of both."""
    measured: Measured = ()
    if len(batches) == 1 and batches[0].is_plain and not done and inv_scale.item() != 1.0:
        (batch,) = batches
        flags = {batch.device: to_device(found_inf, batch.device, copy=True)}
        norm = _norm_here(batch, to_device(inv_scale, batch.device), flags[batch.device])
        if math.isfinite(norm) and norm <= bound.of(batch.dtype):
            measured = (Total(batch.device, norm, batch.dtype),)
    else:
        flags = unscale_(batches, inv_scale, found_inf, done)
    measured = measured or measure(batches, bound)
    flag_(flags, measured)
    return flags, measured


def total_norm(measured: Measured, device: torch.device) -> float | torch.Tensor:
    """L2 norm over everything measured: a float where the host knows it, else 0-dim on ``device``."""
    known = math.hypot(*(part.norm for part in measured if isinstance(part, Total)))
    norms = [part.norms for part in measured if isinstance(part, Part)]
    if not norms:
        return known
    wide = widest(device)
    here = [
        torch.full((1,), known, dtype=wide, device=device),
        *(to_device(t.to(wide), device) for t in norms),
    ]
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(here))
    return total
