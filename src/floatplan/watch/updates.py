"""What a step did to the weights: updates, and those that rounding took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from floatplan.formats import FORMATS
from floatplan.records import LostUpdates
from floatplan.watch.histogram import SMALL, Histograms
from floatplan.watch.tensors import format_name

NARROWER = {
    torch.float64: ("fp32", "bf16", "fp16"),
    torch.float32: ("bf16", "fp16"),
    torch.bfloat16: (),
    torch.float16: (),
}
"""Formats of which it is told what they would have lost, by that of the weights."""


class _Group(NamedTuple):
    """Parameters of one dtype and device that are looked at together; a large one alone."""

    names: list[str]
    before: list[Tensor]


@dataclass(frozen=True)
class _Found:
    """``counts``: shape (2 + formats, parameters), int64: with a gradient, lost, lost in each format."""

    names: list[str]
    dtype: torch.dtype
    counts: Tensor


class Updates:
    """Weights as they are before a step. Holds a copy of each.

    Args:
        parameters: name to parameter, of real numbers; those without ``requires_grad`` are left out.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._now = {name: p for name, p in parameters.items() if p.requires_grad and p.dtype in NARROWER}
        self._groups: list[_Group] = []
        small: dict[tuple[torch.dtype, torch.device], _Group] = {}
        with torch.no_grad():
            for name, parameter in self._now.items():
                before = local(parameter).clone()
                if before.numel() > SMALL:
                    self._groups.append(_Group([name], [before]))
                    continue
                key = before.dtype, before.device
                if key not in small:
                    small[key] = _Group([], [])
                    self._groups.append(small[key])
                small[key].names.append(name)
                small[key].before.append(before)
        self._found: list[_Found] = []

    @torch.no_grad()
    def compare(self, histograms: Histograms[tuple[str, str, torch.dtype]]) -> None:
        """The step was taken: count what it changed, and add updates to ``histograms``.

        Gradients must still be there. A parameter without one was not stepped and is left out.
        """
        for names, before in self._groups:
            rows = [row for row, name in enumerate(names) if self._now[name].grad is not None]
            if rows:
                self._compare([names[row] for row in rows], [before[row] for row in rows], histograms)
        self._groups = []

    def _compare(
        self,
        names: list[str],
        before: list[Tensor],
        histograms: Histograms[tuple[str, str, torch.dtype]],
    ) -> None:
        dtype = before[0].dtype
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        old = _flat(before)
        new = _flat([local(self._now[name]) for name in names])
        present = _flat([_gradient(self._now[name]) for name in names]) != 0
        update = new.to(wide) - old.to(wide)
        masks = [present, present & (new == old)]
        for format in NARROWER[dtype]:
            low = old.to(getattr(torch, FORMATS[format].torch_name))
            masks.append(present & ((low.to(wide) + update).to(low.dtype) == low))
        sizes = [one.numel() for one in before]
        for name, part in zip(names, torch.split(update, sizes), strict=True):
            histograms.add(("update", name, dtype), part)
        if len(names) == 1:
            counts = torch.stack([mask.sum() for mask in masks])[:, None]
        else:
            owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes)).to(old.device)
            counts = torch.zeros(len(masks), len(names), dtype=torch.int64, device=old.device)
            counts.index_add_(1, owners, torch.stack(masks).long())
        self._found.append(_Found(names, dtype, counts))

    def records(self, step: int) -> list[LostUpdates]:
        """What `compare` found. Waits for the device."""
        found = []
        for names, dtype, counts in ((one.names, one.dtype, one.counts.tolist()) for one in self._found):
            formats = NARROWER[dtype]
            for name, (count, lost, *lost_in) in zip(names, zip(*counts, strict=True), strict=True):
                by_format = dict(zip(formats, lost_in, strict=True))
                found.append(LostUpdates(step, name, format_name(dtype), count, lost, by_format))
        return found


def local(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph; of one that is spread over ranks, what lies on this one."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    found = local(parameter.grad)
    return found.to_dense() if found.is_sparse else found


def _flat(tensors: list[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([one.reshape(-1) for one in tensors])
