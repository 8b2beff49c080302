"""What a step did to the weights: updates, and those that rounding took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from floatplan.formats import FORMATS
from floatplan.records import LostUpdates
from floatplan.watch.histogram import SMALL, Histograms, local, order_of, rows_of, sample
from floatplan.watch.tensors import format_name

NARROWER = {
    torch.float64: ("fp32", "bf16", "fp16"),
    torch.float32: ("bf16", "fp16"),
    torch.bfloat16: (),
    torch.float16: (),
}
"""Formats of which it is told what they would have lost, by that of the weights."""


class _Watched(NamedTuple):
    """A parameter, and a sample of its weights as they were; see `sample`."""

    name: str
    parameter: Tensor
    before: Tensor

    def now(self) -> Tensor:
        """The same sample now."""
        weights = local(self.parameter)
        return sample(weights, order_of(weights))

    def gradient(self) -> Tensor:
        """That of the gradient."""
        assert self.parameter.grad is not None
        gradient = local(self.parameter.grad)
        gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
        return sample(gradient, order_of(local(self.parameter)))


class _Found(NamedTuple):
    """``counts``: shape (2 + formats, parameters), int64: with a gradient, lost, lost in each format."""

    names: list[str]
    dtype: torch.dtype
    counts: Tensor


class Updates:
    """Weights as they are before a step: a sample of at most `SAMPLE` of each parameter."""

    def __init__(self) -> None:
        self._groups: list[list[_Watched]] = []
        self._found: list[_Found] = []

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep what these are, by name; those without ``requires_grad`` are left out."""
        small: dict[tuple[torch.dtype, torch.device], list[_Watched]] = {}
        for name, parameter in parameters.items():
            if not parameter.requires_grad or parameter.dtype not in NARROWER:
                continue
            weights = local(parameter)
            watched = _Watched(name, parameter, sample(weights, order_of(weights)).clone())
            if watched.before.numel() > SMALL:
                self._groups.append([watched])
                continue
            key = weights.dtype, weights.device
            if key not in small:
                self._groups.append(small.setdefault(key, []))
            small[key].append(watched)

    @torch.no_grad()
    def compare(self, histograms: Histograms[tuple[str, str, torch.dtype]]) -> None:
        """The step was taken: count what it changed, and add updates to ``histograms``.

        Gradients must still be there. A parameter without one was not stepped and is left out.
        """
        for group in self._groups:
            stepped = [one for one in group if one.parameter.grad is not None]
            if stepped:
                self._compare(stepped, histograms)
        self._groups = []

    def _compare(self, group: list[_Watched], histograms: Histograms[tuple[str, str, torch.dtype]]) -> None:
        dtype = group[0].before.dtype
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        old = _joined([one.before for one in group])
        new = _joined([one.now() for one in group])
        gradient = _joined([one.gradient() for one in group])
        # What is not finite is refused, by a scaler that tells nothing, too: no rounding took that.
        present = (gradient != 0) & gradient.isfinite()
        update = new.to(wide) - old.to(wide)
        masks = [present, present & (new == old)]
        for format in NARROWER[dtype]:
            low = old.to(getattr(torch, FORMATS[format].torch_name))
            masks.append(present & ((low.to(wide) + update).to(low.dtype) == low))
        sizes = [one.before.numel() for one in group]
        for one, part in zip(group, torch.split(update, sizes), strict=True):
            histograms.add(("update", one.name, dtype), part, size=local(one.parameter).numel())
        if len(group) == 1:
            counts = torch.stack([mask.sum() for mask in masks])[:, None]
        else:
            owners = rows_of(sizes).to(old.device)
            counts = torch.zeros(len(masks), len(group), dtype=torch.int64, device=old.device)
            counts.index_add_(1, owners, torch.stack(masks).long())
        self._found.append(_Found([one.name for one in group], dtype, counts))

    def records(self, step: int) -> list[LostUpdates]:
        """What `compare` found. Waits for the device."""
        found = []
        for names, dtype, counts in (
            (one.names, one.dtype, one.counts.cpu().tolist()) for one in self._found
        ):
            formats = NARROWER[dtype]
            for name, (count, lost, *lost_in) in zip(names, zip(*counts, strict=True), strict=True):
                by_format = dict(zip(formats, lost_in, strict=True))
                found.append(LostUpdates(step, name, format_name(dtype), count, lost, by_format))
        return found


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
