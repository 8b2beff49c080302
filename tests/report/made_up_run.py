"""A run made up by hand, with all that a report must cope with: skips, a NaN, a failure, several seeds."""

from __future__ import annotations

import math

from floatplan.records import (
    DriftRecord,
    EpochRecord,
    ExplainedOperator,
    Explanation,
    ExplanationRecord,
    FailureRecord,
    ResultRecord,
    RunHeader,
    RunRecord,
    StepRecord,
)
from floatplan.report.runfile import Run, collect

HEADER = RunHeader(
    task="digits",
    description="digits </script> & more",
    rows=("fp32", "bf16", "fp16", "fp16-unscaled"),
    seeds=(0, 1),
    epochs=1,
    batch_size=10,
    device="cpu",
    started="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.13.0"},
    machine={"system": "Linux x86_64"},
)


def training(row: str, seed: int, *, rate: float, accuracy: float, loss: float = 0.5) -> list[RunRecord]:
    """Three steps of one training; in fp16 the second is skipped."""
    scaled = row == "fp16"
    steps: list[RunRecord] = [
        StepRecord(
            row=row,
            seed=seed,
            epoch=1,
            step=step,
            loss=loss / step,
            stepped=not (scaled and step == 2),
            scale=(65536.0 if step < 3 else 32768.0) if scaled else None,
            reason="overflow in <layer>" if scaled and step == 2 else "",
        )
        for step in (1, 2, 3)
    ]
    epoch = EpochRecord(row, seed, 1, 30, 30 / rate, loss, accuracy)
    note = ("products stay in float32",) if scaled else ()
    skipped, scale = (1, 32768.0) if scaled else (0, None)
    result = ResultRecord(row, seed, 30 / rate, rate, 3 * 2**20, loss, accuracy, skipped, scale, note)
    return [*steps, epoch, result]


LINEAR = ExplainedOperator(
    module="fc",
    module_type="Linear",
    operator="aten::linear",
    input_dtypes=("float32",),
    ran_in="bfloat16",
    output_dtypes=("bfloat16",),
    why="class <lower> of policy unified",
    times=1,
    casts=3,
    cast_bytes=1234,
)
EXPLANATION = Explanation("Net", "cpu", "bfloat16", "unified", (LINEAR,))

RECORDS: list[RunRecord] = [
    *training("fp32", 0, rate=100, accuracy=0.980),
    *training("bf16", 0, rate=200, accuracy=0.978),
    *training("fp16", 0, rate=150, accuracy=0.984),
    *training("fp16-unscaled", 0, rate=150, accuracy=0.1, loss=math.nan),
    *training("fp32", 1, rate=50, accuracy=0.984),
    *training("bf16", 1, rate=200, accuracy=0.984),
    *training("fp16", 1, rate=150, accuracy=0.984),
    FailureRecord("fp16-unscaled", 1, "its process was killed by SIGKILL"),
    ExplanationRecord("bf16", EXPLANATION),
]
DRIFT = DriftRecord("bf16", 0, 2, "bf16", "fc", "aten::linear", 0.5, 0.01, 0.2, 0.02, math.inf)
RUN: Run = collect(HEADER, RECORDS)
