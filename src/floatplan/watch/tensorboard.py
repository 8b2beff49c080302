"""The records of a training in TensorBoard, which is no part of what floatplan needs."""

from __future__ import annotations

import importlib
import os
from types import TracebackType
from typing import Any

from floatplan.errors import FloatplanError
from floatplan.formats import FORMATS
from floatplan.records import (
    CastsRecord,
    FindingRecord,
    LostUpdates,
    Numbers,
    NumbersRecord,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
)

SHARES_OF = "fp16", "bf16"
"""Formats of which shares are written."""


class TensorBoardMissing(FloatplanError, ImportError):
    """TensorBoard, or what torch needs to write for it, is not installed."""


def check_tensorboard() -> None:
    """Whether there is a TensorBoard to write for.

    Raises:
        TensorBoardMissing: there is none.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise TensorBoardMissing(
            f"TensorBoard cannot be written ({error}); install it with: pip install tensorboard"
        ) from error


class TensorBoard:
    """Writes each record that it is told for TensorBoard.

    Of a step: loss, loss scale, gradient norm, whether it was skipped, seconds, casts. Of modules and
    parameters: shares of zeros, of what is not finite, and of what would overflow and underflow in fp16 and
    bf16, the largest magnitude, a histogram of binary exponents, shares of lost updates. Findings as text.

    Args:
        folder: as ``SummaryWriter(log_dir=...)`` takes it.

    Raises:
        TensorBoardMissing: it is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))
        self._casts: tuple[int, int, int] = (0, 0, 0)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """Write one record."""
        if isinstance(record, TrainingHeader):
            self._writer.add_text("training", _header_text(record), record.after)
        elif isinstance(record, TrainedStep):
            self._step(record)
        elif isinstance(record, NumbersRecord):
            self._numbers(record)
        elif isinstance(record, LostUpdates):
            self._lost(record)
        elif isinstance(record, CastsRecord):
            self._add_casts(record)
        elif isinstance(record, FindingRecord):
            self._writer.add_text("finding", "  \n".join(record.diagnosis.sentences()), record.step)

    def flush(self) -> None:
        """Have all in the file."""
        self._write_casts()
        self._writer.flush()

    def close(self) -> None:
        """Flush, and write no more."""
        self._write_casts()
        self._writer.close()

    def _step(self, step: TrainedStep) -> None:
        whose = "" if step.optimizer is None else f" of optimizer {step.optimizer}"
        values = {
            "loss": step.loss,
            "loss scale": step.scale,
            "gradient norm": step.grad_norm,
            "skipped": float(not step.stepped),
            "seconds": step.seconds,
            "forward seconds": step.forward_seconds,
            "backward seconds": step.backward_seconds,
            "step seconds": step.step_seconds,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"step/{name}{whose}", value, step.step)

    def _numbers(self, record: NumbersRecord) -> None:
        numbers, where = record.numbers, f"{record.what}/{record.name or 'the model'}"
        shares = {"zeros": numbers.zeros, "not finite": numbers.not_finite, "largest": numbers.largest}
        lies_in = FORMATS[record.dtype]
        # What lies in a format as narrow went through its rounding: nothing is left to be seen.
        for name in SHARES_OF:
            if FORMATS[name].max < lies_in.max:
                shares[f"overflow in {name}"] = numbers.overflow(name)
            if FORMATS[name].smallest_subnormal > lies_in.smallest_subnormal:
                shares[f"underflow in {name}"] = numbers.underflow(name)
        for name, value in shares.items():
            self._writer.add_scalar(f"{where}/{name}", value, record.step)
        if numbers.exponents():
            self._writer.add_histogram_raw(
                f"{where}/exponents", global_step=record.step, **exponents(numbers)
            )

    def _lost(self, record: LostUpdates) -> None:
        self._writer.add_scalar(f"update/{record.name}/lost", record.share, record.step)
        for name in record.lost_in:
            value = record.share_in(name)
            self._writer.add_scalar(f"update/{record.name}/lost in {name}", value, record.step)

    def _add_casts(self, record: CastsRecord) -> None:
        step, count, size = self._casts
        if step != record.step:
            self._write_casts()
            count = size = 0
        self._casts = record.step, count + record.count, size + record.cast_bytes

    def _write_casts(self) -> None:
        step, count, size = self._casts
        if count:
            self._writer.add_scalar("step/casts", count, step)
            self._writer.add_scalar("step/cast bytes", size, step)
        self._casts = (0, 0, 0)


def exponents(numbers: Numbers) -> dict[str, Any]:
    """A histogram of binary exponents of the finite numbers but 0, as ``add_histogram_raw`` takes it.

    A number in [2**e, 2**(e + 1)) counts as e.
    """
    found = numbers.exponents()
    low, high = min(found), max(found)
    counts = [found.get(exponent, 0) for exponent in range(low, high + 1)]
    return {
        "min": float(low),
        "max": float(high),
        "num": sum(counts),
        "sum": float(sum(exponent * number for exponent, number in found.items())),
        "sum_squares": float(sum(exponent**2 * number for exponent, number in found.items())),
        "bucket_limits": [exponent + 0.5 for exponent in range(low, high + 1)],
        "bucket_counts": counts,
    }


def _header_text(header: TrainingHeader) -> str:
    facts = {
        "model": header.model,
        "precision": header.precision or "not known",
        "parameters": f"{header.parameters:,}",
        "device": header.device,
        "started": header.started,
        **header.versions,
        **header.machine,
    }
    return "  \n".join(f"{name}: {text}" for name, text in facts.items())
