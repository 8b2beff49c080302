"""Norms of gradients, and which of them are not finite: one pass gives both.

A norm added up in float64 is finite exactly when every value of a float32 gradient is finite, since the
square of the largest float32 (1e77) is far from the end of float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from floatplan import _torch
from floatplan.scaling.gradients import Batch, Flags, is_dtensor


@dataclass(frozen=True, slots=True)
class Part:
    """What was measured on one batch of n gradients; its tensors belong to it alone.

    Attributes:
        norms: L2 norm of each gradient, shape (n,), float64 (float32 on devices without it).
        finite: whether every value of each gradient is finite, shape (n,), bool.
        limit: largest value in which an optimizer computes with such a gradient.
    """

    positions: list[int]
    shapes: list[torch.Size]
    norms: torch.Tensor
    finite: torch.Tensor
    limit: float


Measured = tuple[Part, ...]


def _peaks(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest absolute value of each tensor, shape (n,); not finite if a value is not."""
    return torch.stack(
        [tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
    )


_ROW = 4096


def _shortened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the same norm: the norms of rows of 4096 values where there are many values.

    One long sum of squares in float32 on the CPU is 0.07 % too small at 16 million values, and takes twice
    as long (torch 2.13).
    """
    if tensor.numel() < 16 * _ROW or not tensor.is_contiguous():
        return tensor
    flat = tensor.view(-1)
    whole = flat.numel() - flat.numel() % _ROW
    norms: torch.Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    return torch.cat([norms, flat[whole:]])


def _measure_on_cpu(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms in float32, which is cheap; the exact answer only when one is not finite, which is rare."""
    wide = torch.promote_types(dtype, torch.float32)
    norms = _torch.norms([_shortened(tensor, wide) for tensor in tensors], wide).double()
    finite = torch.isfinite(norms)
    if finite.all():
        return norms, finite
    return _torch.norms(tensors, torch.float64), torch.isfinite(_peaks(tensors))


def _measure(tensors: list[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(norms, finite) of the tensors of one batch, without waiting for an accelerator."""
    if batch.device.type == "cpu":
        return _measure_on_cpu(tensors, batch.dtype)
    if batch.device.type == "mps":  # has no float64
        return _torch.norms(tensors, torch.float32), torch.isfinite(_peaks(tensors))
    norms = _torch.norms(tensors, torch.float64)
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


def measure(batches: Iterable[Batch]) -> Measured:
    """Norm and finiteness of every gradient, one read of each. No device-to-host sync."""
    parts = []
    for batch in batches:
        whole = is_dtensor(batch.grads[0])
        norms, finite = _measure_dtensors(batch) if whole else _measure(batch.grads, batch)
        limit = torch.finfo(torch.promote_types(batch.dtype, torch.float32)).max
        parts.append(Part(batch.positions, batch.shapes, norms, finite, limit))
    return tuple(parts)


def divided(measured: Measured, divisor: torch.Tensor) -> Measured:
    """What ``measured`` becomes when an optimizer divides its gradients by ``divisor`` (0-dim).

    A gradient whose norm would pass the largest value counts as not finite. This is stricter than value
    by value, and costs no further pass over the gradients.
    """
    parts = []
    for part in measured:
        norms = part.norms / divisor.to(part.norms)
        # False for NaN, too.
        parts.append(
            Part(part.positions, part.shapes, norms, part.finite & (norms <= part.limit), part.limit)
        )
    return tuple(parts)


def flag_(flags: Flags, measured: Measured) -> None:
    """Set the flag of each device on which a gradient is not finite."""
    for part in measured:
        bad = part.finite.all().logical_not()
        flag = flags.get(part.finite.device)
        if flag is None:
            flags[part.finite.device] = bad.float()
        else:
            flag.masked_fill_(bad, 1.0)


def total_norm(measured: Measured, device: torch.device) -> torch.Tensor:
    """L2 norm over everything measured, 0-dim on ``device``."""
    norms = [part.norms.to(device) for part in measured]
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return total
