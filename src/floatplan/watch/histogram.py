"""`Numbers` of tensors, counted where they lie: nothing is asked of the device until they are read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from floatplan.records.numbers import Numbers, boundaries

BINS = len(boundaries()) + 1


@functools.cache
def _boundaries(device: torch.device) -> Tensor:
    return torch.tensor(boundaries(), dtype=torch.float32, device=device)


def histogram(tensor: Tensor) -> Tensor:
    """Counts per bin and the largest finite magnitude: shape (`BINS` + 1,), float64, on the tensor's device.

    No device-to-host sync. (A device without float64 gets float32, which counts exactly up to 2**24.)

    Args:
        tensor: of any floating-point dtype and shape; float64 is rounded to float32.
    """
    values = tensor.detach().reshape(-1).float().abs()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    found = torch.zeros(BINS + 1, dtype=wide, device=tensor.device)
    if not values.numel():
        return found
    places = torch.bucketize(values, _boundaries(tensor.device), out_int32=False, right=True)
    places = torch.where(values.isnan(), BINS - 1, places)
    found.scatter_add_(0, places, torch.ones((), dtype=wide, device=tensor.device).expand_as(places))
    found[BINS] = torch.where(values.isfinite(), values, 0.0).amax().to(wide)
    return found


def read(found: Sequence[Tensor]) -> list[Numbers]:
    """What `histogram` returned, as records: one wait for the device for all of them."""
    if not found:
        return []
    rows = torch.stack([one.double().cpu() if one.is_mps else one for one in found]).cpu().tolist()
    return [Numbers(tuple(map(math.floor, row[:BINS])), row[BINS]) for row in rows]
