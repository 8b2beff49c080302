"""Records in TensorBoard, read back with its own reader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from floatplan.errors import FloatplanError
from floatplan.records import CastsRecord, Diagnosis, FindingRecord, LostUpdates, NumbersRecord, TrainedStep
from floatplan.watch.histogram import numbers_of
from floatplan.watch.tensorboard import TensorBoard, TensorBoardMissing, exponents

VALUES = torch.tensor([1.0, 1.5, 4.0, -0.25, 0.0, 70000.0, 1e-9])


def test_a_histogram_is_of_exponents() -> None:
    found = exponents(numbers_of(VALUES[:5]))
    assert (found["min"], found["max"], found["num"], found["sum"]) == (-2.0, 2.0, 4, 0.0)
    assert found["bucket_limits"] == [-1.5, -0.5, 0.5, 1.5, 2.5]
    assert found["bucket_counts"] == [1, 0, 2, 0, 1]
    assert found["sum_squares"] == 8.0


def test_without_tensorboard_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TensorBoardMissing, match="pip install tensorboard") as caught:
        TensorBoard(tmp_path)
    assert isinstance(caught.value, FloatplanError)
    assert not list(tmp_path.iterdir())


def test_all_records_come_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers = numbers_of(VALUES)
    with TensorBoard(tmp_path) as board:
        board.write(TrainedStep(1, True, "stepped", 8.0, 8.0, 2.5, None, 0, 0.75, None, 0.5, 0.1, 0.2, 0.05))
        board.write(NumbersRecord(1, "activation", "a.b", "fp32", 1.0, numbers))
        board.write(NumbersRecord(1, "gradient", "", "fp16", 8.0, numbers_of(VALUES[:5])))
        board.write(LostUpdates(1, "a.w", "fp32", 8, 2, {"bf16": 6}))
        board.write(CastsRecord(1, "a", "fp32", "fp16", "weight", 2, 48))
        board.write(CastsRecord(1, "b", "fp32", "fp16", "weight", 1, 12))
        board.write(TrainedStep(2, False, "overflow", 8.0, 4.0, None, "a.w", 1, None, 1))
        board.write(CastsRecord(2, "b", "fp32", "fp16", "weight", 1, 12))
        board.write(FindingRecord(2, Diagnosis(False, "a", cause="too large", fix="less", where="forward")))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert scalars["step/loss"] == [(1, 0.75)]
    assert scalars["step/loss scale of optimizer 1"] == [(2, 8.0)]
    assert scalars["step/skipped of optimizer 1"] == [(2, 1.0)]
    assert scalars["step/gradient norm"] == [(1, 2.5)]
    assert scalars["step/casts"] == [(1, 3.0), (2, 1.0)]
    assert scalars["step/cast bytes"] == [(1, 60.0), (2, 12.0)]
    assert scalars["update/a.w/lost in bf16"] == [(1, 0.75)]
    assert scalars["activation/a.b/overflow in fp16"] == [(1, pytest.approx(1 / 7))]
    assert scalars["activation/a.b/underflow in fp16"] == [(1, pytest.approx(1 / 7))]
    assert scalars["activation/a.b/largest"] == [(1, 70000.0)]
    assert scalars["gradient/the model/zeros"] == [(1, pytest.approx(0.2))]
    assert "gradient/the model/underflow in fp16" not in scalars, "what became 0 in fp16 cannot be told"
    (histogram,) = events.Histograms("activation/a.b/exponents")
    assert histogram.histogram_value.num == 6
    (text,) = events.Tensors("finding/text_summary")
    assert b"too large" in text.tensor_proto.string_val[0]
