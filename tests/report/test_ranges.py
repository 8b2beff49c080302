"""Every figure of the table of modules against NumPy on the same tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from recorded import recorded

from floatplan.formats import FORMATS
from floatplan.records import LostUpdates, Numbers, NumbersRecord
from floatplan.records.numbers import WHAT_IF
from floatplan.report.ranges import (
    LEVELS,
    ModuleRow,
    by_risk,
    judged_format,
    lost_share,
    module_rows,
    share_below,
    total,
)
from floatplan.report.runfile import TrainingRun
from floatplan.watch.histogram import numbers_of


def arrays_of(row: ModuleRow) -> numpy.ndarray:
    """All numbers of a row, from the tensors themselves."""
    made = recorded()
    skipped = {one.step for one in made.run.steps if not one.stepped}
    kept = [
        array
        for step, array in made.arrays(row.what, row.module)
        if not ("gradient" in row.what and step in skipped)
    ]
    return numpy.concatenate(kept)


def rows() -> tuple[ModuleRow, ...]:
    return module_rows(recorded().run)


def row_of(module: str, what: str) -> ModuleRow:
    (row,) = (row for row in rows() if (row.module, row.what) == (module, what))
    return row


def test_every_share_is_numpys() -> None:
    for row in rows():
        array = arrays_of(row)
        finite = array[numpy.isfinite(array)]
        assert row.numbers.count == array.size
        assert row.numbers.largest == numpy.abs(finite).max()
        assert row.numbers.zeros == numpy.mean(array == 0)
        for name in WHAT_IF:
            fit = row.fits[name]
            dtype = getattr(torch, FORMATS[name].torch_name)
            rounded = torch.from_numpy(finite).to(dtype).float().numpy()
            if fit.underflow is not None:
                assert fit.underflow == numpy.sum((rounded == 0) & (finite != 0)) / array.size
            if fit.overflow is not None and name != row.dtype:
                most = 464 if name == "fp8_e4m3" else FORMATS[name].max
                passing = numpy.abs(finite) > most if name == "fp8_e4m3" else ~numpy.isfinite(rounded)
                assert fit.overflow == numpy.sum(passing) / array.size
            if row.numbers.largest:
                assert fit.room == pytest.approx(
                    math.log2(FORMATS[name].max / float(numpy.abs(finite).max()))
                )


def test_what_underflowed_in_the_format_itself_is_not_told() -> None:
    row = row_of("first", "activation")
    assert row.dtype == "fp16"
    assert row.fits["fp16"].underflow is None
    assert row.fits["bf16"].underflow is None
    assert row.fits["fp8_e4m3"].underflow is not None


def test_what_is_not_finite_in_fp16_may_have_fitted_a_wider_format() -> None:
    row = row_of("hot", "activation")
    assert row.fits["fp16"].overflow == numpy.mean(~numpy.isfinite(arrays_of(row))) > 0
    assert (row.fits["bf16"].overflow, row.fits["bf16"].risk) == (None, "unknown")
    assert row.fits["fp8_e5m2"].risk == "not finite"


def test_what_overflows_itself_stands_before_what_received_it() -> None:
    values = {"received": [math.nan, math.nan], "cause": [math.inf, 6e4, 1.0, 1.0]}
    records = tuple(
        NumbersRecord(1, "activation", name, "fp16", 1.0, numbers_of(torch.tensor(numbers)))
        for name, numbers in values.items()
    )
    run = TrainingRun(recorded().run.header, (), records)
    assert [row.module for row in by_risk(module_rows(run), "fp16")] == ["cause", "received"]
    around = tuple(replace(records[1], name=name) for name in ("block", "block.cause"))
    ordered = by_risk(module_rows(replace(run, numbers=around)), "fp16")
    assert [row.module for row in ordered] == ["block.cause", "block"]


def test_the_planted_risks_are_found() -> None:
    assert row_of("hot", "activation").fits["fp16"].risk == "not finite"
    assert row_of("wide", "activation").fits["fp16"].risk == "overflow"
    assert row_of("faint", "gradient").fits["fp16"].risk == "underflow"
    assert row_of("first", "update").fits["bf16"].risk == "lost updates"
    assert row_of("head", "activation").fits["fp16"].risk == "none"
    assert row_of("head", "update").fits["fp8_e4m3"].risk == "unknown"
    first = by_risk(rows(), "fp16")[:2]
    assert [row.module for row in first] == ["hot", "wide"]
    scores = [row.fits["fp16"].score for row in by_risk(rows(), "fp16")]
    assert scores == sorted(scores, reverse=True)


def test_lost_updates_are_numpys() -> None:
    made = recorded()
    for row in rows():
        if row.what != "update":
            assert row.lost is None
            continue
        taken = own = 0
        low = {"bf16": 0, "fp16": 0}
        for named in made.weights.values():
            for name, (before, after, gradient) in named.items():
                if name.rpartition(".")[0] == row.module:
                    has = gradient != 0
                    taken += int(has.sum())
                    own += int((has & (before == after)).sum())
                    low["fp16"] += int(
                        (has & (before.astype(numpy.float16) == after.astype(numpy.float16))).sum()
                    )
                    low["bf16"] += int((has & (_bf16(before) == _bf16(after))).sum())
        assert row.lost is not None
        assert (row.lost.count, row.lost.own) == (taken, own / taken)
        assert row.lost.in_format == {name: low[name] / taken for name in low}
        assert row.lost_in("fp32") == own / taken


def _bf16(array: numpy.ndarray) -> numpy.ndarray:
    """Rounded to nearest, ties to even, by integer arithmetic on the bits."""
    bits = array.astype(numpy.float32).view(numpy.uint32).astype(numpy.uint64)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def test_subnormals_are_numpys() -> None:
    row = row_of("first", "gradient")
    array = numpy.abs(arrays_of(row))
    assert row.dtype == "fp16"
    assert row.subnormal == numpy.sum((array > 0) & (array < 2.0**-14)) / numpy.sum(array > 0)
    for limit in (2.0**-20, 1.0, 2.0**3):
        nonzero = array[array > 0]
        assert share_below(row.numbers, limit) == numpy.mean(nonzero < limit)


def test_gradients_of_skipped_steps_are_left_out() -> None:
    made = recorded()
    skipped = {one.step for one in made.run.steps if not one.stepped}
    assert any(step in skipped for step in made.raw)
    assert row_of("head", "gradient").numbers.not_finite == 0
    assert row_of("head", "gradient").steps == len(set(made.raw) - skipped)
    assert row_of("head", "activation").steps == len(made.raw)


def test_lost_shares_of_formats_that_all_were_told() -> None:
    records = [
        LostUpdates(1, "a.w", "fp32", 4, 1, {"bf16": 2, "fp16": 3}),
        LostUpdates(2, "a.w", "fp32", 0, 0, {"bf16": 0}),
    ]
    assert lost_share(records).in_format == {"bf16": 0.5}
    assert lost_share(records).own == 0.25


def test_a_sum_of_numbers_is_that_of_all() -> None:
    one, two = numbers_of(torch.tensor([1.0, 0.0])), numbers_of(torch.tensor([math.inf, 7.0]))
    assert total([one, two]) == one + two


@pytest.mark.parametrize(
    ("precision", "dtypes", "judged"),
    [
        ("bf16", [], "bf16"),
        ("plan", ["fp32", "bf16", "bf16", "fp16"], "bf16"),
        ("fp32", ["fp32"], "fp16"),
    ],
)
def test_the_format_of_the_training_is_judged_first(precision: str, dtypes: list[str], judged: str) -> None:
    header = replace(recorded().run.header, precision=precision)
    none = Numbers((0,) * len(numbers_of(torch.zeros(1)).bins), 0.0)
    numbers = tuple(NumbersRecord(1, "activation", f"m{n}", d, 1.0, none) for n, d in enumerate(dtypes))
    assert judged_format(TrainingRun(header, numbers=numbers)) == judged


def alone(what: str, dtype: str, *values: float) -> ModuleRow:
    return ModuleRow("m", what, dtype, 1, numbers_of(torch.tensor(values)), (1.0, 1.0))  # type: ignore[arg-type]


def test_only_what_no_scale_moves_is_near_a_limit() -> None:
    assert alone("activation", "fp16", 5e4).fit("fp16").risk == "near"
    assert alone("weight", "fp32", 5e4).fit("fp16").risk == "near"
    assert alone("gradient", "fp16", 5e4).fit("fp16").risk == "none"


def test_what_nothing_has_to_keep_in_a_format_counts_least() -> None:
    kept, elsewhere = alone("weight", "fp32", 1e-9), alone("weight gradient", "fp32", 1e-9)
    assert kept.fit("fp16").risk == elsewhere.fit("fp16").risk == "underflow"
    assert by_risk([elsewhere, kept], "fp16") == (kept, elsewhere)
    assert elsewhere.fit("fp16").score < LEVELS["underflow"]


def test_numbers_that_are_all_zero_are_no_risk() -> None:
    zeros = ModuleRow("m", "activation", "fp32", 1, numbers_of(torch.zeros(5)), (1.0, 1.0))
    assert {fit.risk for fit in zeros.fits.values()} == {"none"}
    assert all(0 <= fit.score < max(LEVELS.values()) + 1 for fit in zeros.fits.values())
    assert zeros.fits["fp16"].room is None
