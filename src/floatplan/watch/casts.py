"""The cast ledger: what the regions of one step's forwards cast, by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from floatplan.records import CastsRecord
from floatplan.watch.tensors import format_name

What = Literal["weight", "activation"]


@dataclass
class _Tally:
    count: int = 0
    cast_bytes: int = 0


class CastLedger:
    """Counts casts by module, formats, and whether it was a weight."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, torch.dtype, torch.dtype, What], _Tally] = {}

    def note(self, module: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """``tensor`` is cast in ``module``."""
        owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        is_weight = owner.is_leaf and (owner.requires_grad or isinstance(owner, torch.nn.Parameter))
        key = module, tensor.dtype, dtype, "weight" if is_weight else "activation"
        tally = self._tallies.setdefault(key, _Tally())  # type: ignore[arg-type]
        tally.count += 1
        tally.cast_bytes += tensor.numel() * (tensor.element_size() + dtype.itemsize)

    def records(self, step: int) -> Iterator[CastsRecord]:
        """A line for each kind of cast."""
        for (module, source, target, what), tally in self._tallies.items():
            yield CastsRecord(
                step, module, format_name(source), format_name(target), what, tally.count, tally.cast_bytes
            )
