"""`Numbers` of tensors, counted where they lie: nothing is asked of the device until they are read."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from floatplan.records.numbers import Numbers, boundaries

Key = TypeVar("Key", bound=Hashable)

BINS = len(boundaries()) + 1
SAMPLE = 2**17
"""Elements of a tensor that are counted; of larger ones an even sample is. What is rarer than 1 in 100,000
may be missed, and shares are off by 0.4 points at most, 99 times of 100. The largest is looked for in all."""
SMALL = 2**14
"""Elements up to which tensors are counted together: kernels on so few cost what their launch costs."""
PENDING = 2**20
"""Elements of small tensors that are counted at once."""


# --- What is counted ------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph; of one that is spread over ranks, what lies on this one."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions from that with the largest stride on: as its elements lie in memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def sample(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """An even sample of its elements in that order of its dimensions, shape (at most `SAMPLE`,); all if they
    are as few. A view, where the elements lie so.

    The step has no divisor in common with the number of elements, so that no row or column is preferred.
    """
    flat = tensor.permute(tuple(order)).reshape(-1)
    size = flat.numel()
    step = -(-size // SAMPLE)
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return flat[::step] if step > 1 else flat


def _real(tensor: Tensor) -> tuple[Tensor, int]:
    """What is counted, and how often: of complex numbers, both parts; of sparse and nested tensors, what is
    stored; of large expanded ones, what lies in memory.
    """
    values = _stored(local(tensor))
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    whole = values.numel()
    if whole > SAMPLE:
        for dim, stride in enumerate(values.stride()):
            values = values.narrow(dim, 0, 1) if stride == 0 else values
    return values, whole // max(1, values.numel())


def _stored(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    if tensor.is_sparse:
        return tensor._values()
    return tensor.to_dense() if tensor.is_mkldnn else tensor.values()


# --- Counting -------------------------------------------------------------------------------------------


@functools.cache
def _table(device: torch.device) -> Tensor:
    """From what `_keys` returns to bins: shape (2**20,), int16. Searching takes 5 times as long."""
    low = [2 * (bits >> 12) + (bits & 0xFFF > 0) for bits in map(_bits, boundaries())]
    found = torch.bucketize(torch.arange(2**20, device="cpu"), torch.tensor(low, device="cpu"), right=True)
    return found.to(device, torch.int16)


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _keys(magnitudes: Tensor) -> Tensor:
    """What a bin depends on, int32: the first 20 bits, and whether any of the others is set.

    No boundary has more bits than that, so that "from this number on" and "after this number" are told apart.
    """
    bits = magnitudes.view(torch.int32)
    return (bits >> 12).bitwise_left_shift_(1).add_((bits & 0xFFF) != 0)


def _count(values: Tensor, rows: Tensor | None, counts: Tensor) -> None:
    """Add magnitudes, shape (n,), to ``counts``, shape (rows, `BINS`); ``rows`` says to which, (n,) int64."""
    places = _table(values.device).index_select(0, _keys(values)).long()
    if rows is not None:
        places += rows * BINS
    one = torch.ones((), dtype=torch.int64, device=places.device)
    counts.view(-1).scatter_add_(0, places, one.expand_as(places))


def _largest(values: Tensor) -> Tensor:
    """Largest finite magnitude of some, 0-dim float32."""
    return torch.where(values.isfinite(), values, 0.0).amax()


def rows_of(sizes: Sequence[int]) -> Tensor:
    """0 as often as the first says, 1 as often as the second, ...; int64 on the CPU."""
    numbers = torch.arange(len(sizes), device="cpu")
    return torch.repeat_interleave(numbers, torch.tensor(sizes, dtype=torch.int64, device="cpu"))


class _Large(NamedTuple):
    """Counts (1, `BINS`) and extreme of one key's large tensors, and the extreme of all, finite or not."""

    counts: Tensor
    finite: Tensor
    all: Tensor


class Histograms(Generic[Key]):
    """Counts of many tensors: of several added under one key, together.

    No device-to-host sync but in `read`. Numbers in float64 are rounded to float32.
    """

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._large: dict[tuple[torch.device, Key], _Large] = {}
        self._pending: dict[torch.device, list[tuple[Key, Tensor]]] = {}
        self._waiting: dict[torch.device, int] = {}
        self._small: list[tuple[Sequence[Key], Tensor, Tensor]] = []

    def add(self, key: Key, tensor: Tensor, factor: float | Tensor = 1.0, size: int | None = None) -> None:
        """Count the numbers of a floating-point or complex tensor of any shape as they are now.

        Args:
            key: under which they are counted.
            tensor: whose numbers.
            factor: 0-dim if a tensor; the product is rounded to float32.
            size: of what ``tensor`` is a sample.
        """
        real, repeated = _real(tensor)
        self._sizes[key] = self._sizes.get(key, 0) + (repeated * real.numel() if size is None else size)
        values = sample(real, order_of(real)).float().abs()
        has_factor = isinstance(factor, Tensor) or factor != 1.0
        if has_factor:
            values.mul_(factor).abs_()  # a product may have made a NaN with a sign
        device = values.device
        if values.numel() <= SMALL:
            self._pending.setdefault(device, []).append((key, values))
            self._waiting[device] = self._waiting.get(device, 0) + values.numel()
            if self._waiting[device] > PENDING:
                self._count_pending(device)
            return
        if (device, key) not in self._large:
            zeros = torch.zeros(2, dtype=torch.float32, device=device)
            counts = torch.zeros(1, BINS, dtype=torch.int64, device=device)
            self._large[device, key] = _Large(counts, *zeros.unbind())
        found = self._large[device, key]
        _count(values, None, found.counts)
        torch.maximum(found.finite, _largest(values), out=found.finite)
        if real.numel() == values.numel():
            torch.maximum(found.all, values.amax(), out=found.all)
            return
        low, high = torch.aminmax(real if real.dtype.itemsize > 1 else real.float())
        extreme = torch.maximum(-low, high).float()
        torch.maximum(found.all, extreme * factor if has_factor else extreme, out=found.all)

    def _count_pending(self, device: torch.device) -> None:
        pending = self._pending.pop(device, [])
        self._waiting[device] = 0
        if not pending:
            return
        sizes = [values.numel() for _, values in pending]
        rows = rows_of(sizes).to(device, non_blocking=True)
        values = torch.cat([values for _, values in pending])
        counts = torch.zeros(len(pending), BINS, dtype=torch.int64, device=device)
        _count(values, rows, counts)
        largest = torch.zeros(len(pending), dtype=torch.float32, device=device)
        largest.scatter_reduce_(0, rows, torch.where(values.isfinite(), values, 0.0), "amax")
        self._small.append(([key for key, _ in pending], counts, largest))

    def read(self) -> dict[Key, Numbers]:
        """All that was added, by key."""
        for device in list(self._pending):
            self._count_pending(device)
        found: dict[Key, Numbers] = {}
        for key, numbers in self._read():
            found[key] = found[key] + numbers if key in found else numbers
        return {
            key: Numbers(numbers.bins, numbers.largest, self._sizes[key], numbers.is_finite)
            for key, numbers in found.items()
        }

    def _read(self) -> Iterator[tuple[Key, Numbers]]:
        for keys, counts, largest in self._small:
            for key, bins, most in zip(keys, counts.cpu().tolist(), largest.cpu().tolist(), strict=True):
                yield key, Numbers(tuple(bins), most, is_finite=bins[-1] == 0)
        for device in {device for device, _ in self._large}:
            mine = {key: large for (at, key), large in self._large.items() if at == device}
            counts = torch.cat([large.counts for large in mine.values()])
            extremes = torch.stack([torch.stack((large.finite, large.all)) for large in mine.values()])
            for key, bins, (finite, of_all) in zip(
                mine, counts.cpu().tolist(), extremes.cpu().tolist(), strict=True
            ):
                is_finite = math.isfinite(of_all)
                yield key, Numbers(tuple(bins), of_all if is_finite else finite, is_finite=is_finite)


def numbers_of(tensor: Tensor) -> Numbers:
    """The numbers of one tensor; waits for its device."""
    histograms: Histograms[str] = Histograms()
    histograms.add("", tensor)
    return histograms.read()[""]
