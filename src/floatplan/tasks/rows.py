"""The rows of a comparison: what precision, by which library, with or without gradient scaling."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from floatplan.errors import DeviceError, PrecisionWarning, TaskError, nearest
from floatplan.formats import format_of
from floatplan.records import KnownStep, StepFacts, StepResult


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: what the command line calls it.
        description: one phrase for reports.
        format: short name of the region's number format; "fp32" means no region at all.
        library: whose autocast and scaler.
        scaled: whether gradients are scaled.
        loop: whether `floatplan.Amp` runs the step.
        chosen: whether that chooses the precision, ``format`` or float32, by what operators cost.
    """

    name: str
    description: str
    format: str = "fp32"
    library: Literal["floatplan", "torch"] = "floatplan"
    scaled: bool = False
    loop: bool = False
    chosen: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The region's dtype."""
        found: torch.dtype = getattr(torch, format_of(self.format).torch_name)
        return found


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("fp32", "float32 throughout"),
        Row("bf16", "floatplan autocast, bfloat16", "bf16"),
        Row("fp16", "floatplan autocast, float16, with GradScaler", "fp16", scaled=True),
        Row("fp16-unscaled", "floatplan autocast, float16, gradients not scaled", "fp16"),
        Row("floatplan", "floatplan's Amp, bfloat16", "bf16", loop=True),
        Row("auto", "floatplan's Amp, precision chosen by cost", "bf16", loop=True, chosen=True),
        Row("torch-bf16", "torch.amp autocast, bfloat16", "bf16", "torch"),
        Row(
            "torch-fp16", "torch.amp autocast, float16, with torch's GradScaler", "fp16", "torch", scaled=True
        ),
    )
}
DEFAULT_ROWS = ("fp32", "bf16", "fp16")


def row_named(name: str) -> Row:
    """The row called ``name``.

    Raises:
        TaskError: there is none; names the nearest, or all.
    """
    if name not in ROWS:
        hint = nearest(name, ROWS) or f"; known rows: {', '.join(ROWS)}"
        raise TaskError(f"no row {name!r}{hint}")
    return ROWS[name]


def check_rows(names: Iterable[str], device: torch.device) -> tuple[Row, ...]:
    """The rows called ``names``, each of which ``device`` can run.

    Raises:
        TaskError: none at all, one that is not known, or one named twice.
        DeviceError: a format that the device lacks.
    """
    rows = tuple(row_named(name) for name in names)
    if not rows:
        raise TaskError(f"no rows to compare; known rows: {', '.join(ROWS)}")
    for row in rows:
        if rows.count(row) > 1:
            raise TaskError(f"row {row.name!r} is named more than once")
        if row.format == "bf16" and lacks_bf16(device):
            name = torch.cuda.get_device_name(device)
            raise DeviceError(f"row {row.name!r} needs bf16, which {name} has not; leave it out with --rows")
    return rows


def lacks_bf16(device: torch.device) -> bool:
    """Whether ``device`` has no bf16 of its own."""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)


class Scaler(Protocol):
    """The part of a gradient scaler that the training loop calls."""

    def scale(self, outputs: torch.Tensor) -> Any:
        """``outputs`` times the scale."""

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Unscale and step, or skip."""

    def update(self) -> None:
        """Adjust the scale."""

    def get_scale(self) -> float:
        """The scale now."""


class TorchScaler:
    """Torch's scaler, whose ``step`` also tells what it did, without one more wait for the device.

    Torch calls the optimizer only when nothing overflowed, which a step hook sees; the scale moves only at
    a skip and after ``growth_interval`` good steps, so it is read back only then.
    """

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._scale = self._scaler.get_scale()
        self._good_in_a_row = 0

    def scale(self, outputs: torch.Tensor) -> Any:
        """``outputs`` times the scale."""
        return self._scaler.scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Torch's step; the result's ``scale`` is the one that it used."""
        calls: list[None] = []
        hook = optimizer.register_step_post_hook(lambda *_: calls.append(None))
        value = self._scaler.step(optimizer)
        hook.remove()
        stepped = bool(calls)
        self._good_in_a_row = self._good_in_a_row + 1 if stepped else 0
        reason = "" if stepped else "torch's scaler found a gradient that is not finite"
        return StepResult(KnownStep(StepFacts(stepped, not stepped, reason, self._scale), value=value))

    def update(self) -> None:
        """Torch's update."""
        self._scaler.update()
        if self._good_in_a_row % self._scaler.get_growth_interval() == 0:
            self._scale = self._scaler.get_scale()

    def get_scale(self) -> float:
        """The scale now."""
        return self._scaler.get_scale()


def region(row: Row, device_type: str) -> AbstractContextManager[Any]:
    """A fresh region of ``row`` to run a forward pass in."""
    if row.format == "fp32":
        return nullcontext()
    if row.library == "torch":
        return torch.amp.autocast(device_type, dtype=row.dtype)
    # Torch's own rows stay clear of the engine: it is imported only where it is measured.
    from floatplan.engine import autocast

    return autocast(device_type, dtype=row.dtype)


def make_scaler(row: Row, device_type: str) -> Scaler | None:
    """The scaler of ``row``; ``None`` where gradients are not scaled."""
    if not row.scaled:
        return None
    if row.library == "torch":
        return TorchScaler(device_type)
    from floatplan.scaling import GradScaler

    return GradScaler(device_type)


def make_amp(row: Row, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The Amp of ``row``; ``None`` where the loop calls region and scaler itself."""
    if not row.loop:
        return None
    from floatplan.loop import Amp

    return Amp(model, optimizer, "auto" if row.chosen else row.dtype)


def notes_on(row: Row, device_type: str) -> tuple[str, ...]:
    """What ``row`` keeps in float32 on this device and why, in sentences.

    The engine warns of the same when it makes its first such region; that warning alone is silenced,
    since the notes stand in the table, the report and the run file.
    """
    if row.format == "fp32" or row.library == "torch":
        return ()
    from floatplan.engine import precision_notes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        region(row, device_type)
    return precision_notes(device_type, row.dtype)
