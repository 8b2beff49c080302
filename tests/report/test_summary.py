"""The numbers of the table, and the sentences under it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import pytest
from made_up_run import HEADER, RUN, training

from floatplan.records import EpochRecord, RunRecord
from floatplan.report.numbers import memory, rate, significant, table_row
from floatplan.report.runfile import Run, collect
from floatplan.report.summary import Spread, conclusion, notes, summarise


def run_of(*trainings: list[RunRecord], seeds: tuple[int, ...] = (0,)) -> Run:
    records = [record for records in trainings for record in records]
    return collect(replace(HEADER, seeds=seeds), records)


def test_rows_stand_in_the_order_asked_for_with_means_and_sample_deviations() -> None:
    fp32, bf16, fp16, unscaled = summarise(run=RUN)
    assert [row.row for row in (fp32, bf16, fp16, unscaled)] == list(HEADER.rows)
    assert fp32.images_per_second == Spread(75.0, pytest.approx(stdev([100, 50])))
    assert fp16.skipped_steps.mean == 1
    assert fp16.final_scale == Spread(32768.0, 0.0)
    assert (unscaled.seeds, unscaled.test_accuracy) == (1, Spread(0.1, None))


def test_speed_is_paired_by_seed() -> None:
    bf16 = summarise(RUN)[1]
    assert bf16.speed == Spread(3.0, pytest.approx(stdev([2, 4])))


def test_without_a_baseline_there_is_no_speed() -> None:
    (only,) = summarise(run_of(training("bf16", 0, rate=10, accuracy=0.9)))
    assert only.speed is None
    assert table_row(only)[3] == "-"


def test_cells_read_well() -> None:
    fp32, _, fp16, unscaled = (table_row(summary) for summary in summarise(RUN))
    assert fp32 == (
        "fp32",
        "0.450 ± 0.212",
        "75 ± 35",
        "1.00 ± 0.00 x",
        "3 MiB",
        "0.500 ± 0.00",
        "98.2 ± 0.3 %",
        "0 ± 0",
        "-",
    )
    assert fp16[-2:] == ("1 ± 0", "32,768")
    assert unscaled[5] == "nan"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.05114, "0.0511"),
        (0.852, "0.852"),
        (12.92, "12.9"),
        (1686.2, "1,686"),
        (3e-6, "3.00e-06"),
        (math.inf, "inf"),
    ],
)
def test_three_digits_count(value: float, text: str) -> None:
    assert significant(value) == text


def test_units_fit_the_size() -> None:
    assert [memory(2**20), memory(3 * 2**30)] == ["1 MiB", "3.00 GiB"]
    assert [rate(1.5e12, "FLOP/s"), rate(2e9, "B/s"), rate(5e6, "B/s"), rate(None, "B/s")] == [
        "1.50 TFLOP/s",
        "2.00 GB/s",
        "5.00 MB/s",
        "-",
    ]


def test_notes_stand_once_and_failures_are_named() -> None:
    assert notes(RUN) == (
        "fp16: products stay in float32",
        "fp16-unscaled (seed 1) did not finish: its process was killed by SIGKILL",
    )


def test_a_disturbed_machine_is_named() -> None:
    epochs = [EpochRecord("fp32", 0, epoch, 30, seconds, 0.5, 0.9) for epoch, seconds in ((1, 1.0), (2, 4.0))]
    (note,) = notes(run_of([*epochs]))
    assert "up to 4.0 times longer" in note
    short = [replace(epoch, seconds=epoch.seconds / 1000) for epoch in epochs]
    assert notes(run_of([*short])) == ()


def test_a_disturbed_run_names_no_fastest_row() -> None:
    """Here fp16 computes what fp32 does; that it ran while the machine was quiet is not its merit."""
    epochs = [EpochRecord("fp32", 0, epoch, 30, seconds, 0.5, 0.9) for epoch, seconds in ((1, 1.0), (2, 4.0))]
    results = [training("fp32", 0, rate=100, accuracy=0.98), training("fp16", 0, rate=900, accuracy=0.98)]
    assert conclusion(run_of([*epochs], *results)) == (
        "This run does not tell which row is fastest: its times are not reliable. "
        "Test accuracy equals fp32's; one seed does not tell how much it varies."
    )


FP32 = training("fp32", 0, rate=100, accuracy=0.98)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            training("bf16", 0, rate=210, accuracy=0.982),
            "bf16 is fastest here: 210 examples per second, 2.10 times fp32. Test accuracy agrees with "
            "fp32's within 0.2 points; one seed does not tell how much it varies.",
        ),
        (
            training("bf16", 0, rate=30, accuracy=0.98),
            "fp32 is fastest here (100 examples per second); bf16 at 0.30 of its rate. Test accuracy equals "
            "fp32's; one seed does not tell how much it varies.",
        ),
        (
            training("bf16", 0, rate=103, accuracy=0.9),
            "bf16 is as fast as fp32 here (103 examples per second). Test accuracy differs from fp32's by "
            "more than a point: bf16's by -8.0 points; one seed does not tell how much it varies.",
        ),
        (
            training("fp16-unscaled", 0, rate=200, accuracy=0.1, loss=math.nan),
            "fp16-unscaled did not train: its loss is not finite. fp32 runs at 100 examples per second here.",
        ),
    ],
)
def test_the_conclusion_says_what_the_numbers_say(other: list[RunRecord], sentence: str) -> None:
    assert conclusion(run_of(FP32, other)) == sentence


def test_with_several_seeds_the_conclusion_names_their_spread() -> None:
    assert conclusion(RUN).endswith(
        "Test accuracy agrees with fp32's within 0.2 points, where seeds alone make it vary by ± 0.4."
    )


def test_a_run_without_results_has_a_conclusion() -> None:
    assert conclusion(run_of()) == "No training finished."
