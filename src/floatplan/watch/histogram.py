"""`Numbers` of tensors, counted where they lie: nothing is asked of the device until they are read."""

from __future__ import annotations

import functools
import struct
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from floatplan.records.numbers import Numbers, boundaries

Key = TypeVar("Key", bound=Hashable)

BINS = len(boundaries()) + 1
SMALL = 2**14
"""Elements up to which tensors are counted together: kernels on so few cost what their launch costs."""
PENDING = 2**20
"""Elements of small tensors that are counted at once."""


@functools.cache
def _table(device: torch.device) -> Tensor:
    """From what `_keys` returns to bins: shape (2**20,), int16. Searching takes 5 times as long."""
    low = [2 * (bits >> 12) + (bits & 0xFFF > 0) for bits in map(_bits, boundaries())]
    found = torch.bucketize(torch.arange(2**20), torch.tensor(low), right=True)
    return found.to(device, torch.int16)


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _keys(magnitudes: Tensor) -> Tensor:
    """What a bin depends on, int32: the first 20 bits, and whether any of the others is set.

    No boundary has more bits than that, so that "from this number on" and "after this number" are told apart.
    """
    bits = magnitudes.view(torch.int32)
    return (bits >> 12).add_((bits + 0xFFF).bitwise_right_shift_(12))


def _magnitudes(tensor: Tensor) -> Tensor:
    """Shape (elements,), float32; a copy. Of complex numbers both parts, of sparse tensors what is stored."""
    values = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.is_sparse:
        values = values._values()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.float().abs().reshape(-1)


def _chunks(values: Tensor) -> Iterator[Tensor]:
    """Pieces of which what is computed on the way stays in the cache, or does not fill an accelerator."""
    return iter(torch.split(values, 2**18 if values.device.type == "cpu" else 2**24))


def _count(values: Tensor, rows: Tensor | None, counts: Tensor) -> None:
    """Add magnitudes, shape (n,), to ``counts``, shape (rows, `BINS`); ``rows`` says to which, (n,) int64."""
    places = _table(values.device).index_select(0, _keys(values)).long()
    if rows is not None:
        places += rows * BINS
    counts.view(-1).scatter_add_(
        0, places, torch.ones((), dtype=torch.int64, device=places.device).expand_as(places)
    )


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)


class Histograms(Generic[Key]):
    """Counts of many tensors: of several added under one key, together.

    No device-to-host sync but in `read`. Numbers in float64 are rounded to float32.
    """

    def __init__(self) -> None:
        self._keys: dict[torch.device, dict[Key, int]] = {}
        self._large: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
        self._pending: dict[torch.device, list[tuple[int, Tensor]]] = {}
        self._waiting: dict[torch.device, int] = {}
        self._small: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}

    def add(self, key: Key, tensor: Tensor, factor: float | Tensor = 1.0) -> None:
        """Count the numbers of a floating-point or complex tensor of any shape as they are now.

        Args:
            key: under which they are counted.
            tensor: whose numbers.
            factor: 0-dim if a tensor; the product is rounded to float32.
        """
        values = _magnitudes(tensor)
        if isinstance(factor, Tensor) or factor != 1.0:
            values *= factor
        device = values.device
        known = self._keys.setdefault(device, {})
        place = known.setdefault(key, len(known))
        if values.numel() <= SMALL:
            self._pending.setdefault(device, []).append((place, values))
            self._waiting[device] = self._waiting.get(device, 0) + values.numel()
            if self._waiting[device] > PENDING:
                self._count_pending(device)
            return
        if (device, place) not in self._large:
            counts = torch.zeros(1, BINS, dtype=torch.int64, device=device)
            self._large[device, place] = counts, torch.zeros((), device=device)
        counts, largest = self._large[device, place]
        for chunk in _chunks(values):
            _count(chunk, None, counts)
            torch.maximum(largest, _finite(chunk).amax(), out=largest)

    def _count_pending(self, device: torch.device) -> None:
        pending = self._pending.pop(device, [])
        self._waiting[device] = 0
        if not pending:
            return
        sizes = torch.tensor([values.numel() for _, values in pending])
        rows = torch.repeat_interleave(torch.arange(len(pending)), sizes).to(device, non_blocking=True)
        values = torch.cat([values for _, values in pending])
        counts = torch.zeros(len(pending), BINS, dtype=torch.int64, device=device)
        _count(values, rows, counts)
        largest = torch.zeros(len(pending), device=device)
        largest.scatter_reduce_(0, rows, _finite(values), "amax")
        self._small.setdefault(device, []).extend(
            (place, counts[row], largest[row]) for row, (place, _) in enumerate(pending)
        )

    def read(self) -> dict[Key, Numbers]:
        """All that was added, by key, in the order of first adding on each device."""
        found: dict[Key, Numbers] = {}
        for device, known in self._keys.items():
            self._count_pending(device)
            rows = [*self._small.get(device, ())]
            rows += [
                (place, counts[0], largest)
                for (at, place), (counts, largest) in self._large.items()
                if at == device
            ]
            bins_of = torch.stack([count for _, count, _ in rows]).tolist()
            largest_of = torch.stack([one for _, _, one in rows]).tolist()
            names = list(known)
            by_place: dict[int, Numbers] = {}
            for (place, _, _), bins, most in zip(rows, bins_of, largest_of, strict=True):
                numbers = Numbers(tuple(bins), most)
                by_place[place] = by_place[place] + numbers if place in by_place else numbers
            for place in sorted(by_place):
                key = names[place]
                found[key] = found[key] + by_place[place] if key in found else by_place[place]
        return found


def numbers_of(tensor: Tensor) -> Numbers:
    """The numbers of one tensor; waits for its device."""
    histograms: Histograms[str] = Histograms()
    histograms.add("", tensor)
    return histograms.read()[""]
