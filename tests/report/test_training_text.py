"""A training in a terminal and as JSON: the same figures as on the page."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy
from made_up_run import DRIFT, RUN
from recorded import EVERY, STEPS, recorded
from rich.console import Console
from rich.table import Table

from floatplan.records import Numbers, NumbersRecord, WeightsRecord
from floatplan.records.numbers import WHAT_IF, boundaries
from floatplan.report.comparison_json import comparison_json
from floatplan.report.lines import parse_line
from floatplan.report.runfile import TrainingRun, collect_training
from floatplan.report.training_json import training_json
from floatplan.report.training_text import MOST_LINES, training_lines
from floatplan.report.verdict import verdict


def lines(run: TrainingRun) -> list[str | Table]:
    return list(training_lines(run))


def text(run: TrainingRun) -> str:
    console = Console(file=io.StringIO(), width=200)
    for line in lines(run):
        console.print(line, markup=False, soft_wrap=isinstance(line, str))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_text_says_it_all() -> None:
    run = recorded().run
    said = text(run)
    assert verdict(run).headline in said
    for one in verdict(run).statements:
        assert one.text in said
    assert 'module = "hot"' in said
    titles = [line.title for line in lines(run) if isinstance(line, Table)]
    assert titles == [
        f"modules by risk in fp16, {MOST_LINES} of {len(training_json(run)['modules'])}",
        "loss scale",
        f"casts of forwards: 10 a step, {_kib()}",
        "time of a step",
    ]
    assert "not seen: the inside of compiled modules" in said


def _kib() -> str:
    cast = [pair for named in recorded().casts.values() for pairs in named.values() for pair in pairs]
    size = sum(source.nbytes + target.nbytes for source, target in cast) / len(recorded().casts)
    return f"{size / 1024:.3g} KiB"


def test_numbers_of_one_step_are_not_said_of_the_training() -> None:
    run = recorded().run
    one = replace(run, numbers=tuple(record for record in run.numbers if record.step == 1))
    assert "recorded at step 1 alone" in text(one)
    assert "every=" in text(one)
    assert "alone" not in text(run)


def test_a_loop_that_tells_no_parts_of_a_step_has_its_time_alone() -> None:
    run = recorded().run
    untold = {"forward_seconds": None, "backward_seconds": None, "step_seconds": None}
    plain = replace(run, steps=tuple(replace(one, **untold) for one in run.steps))
    assert "the whole step" in text(plain)
    assert "rest: data" in text(run)
    assert "rest: data" not in text(plain)


def test_where_nothing_is_finite_there_is_no_largest() -> None:
    bins = numpy.zeros(len(boundaries()) + 1, dtype=int)
    bins[-1] = 4
    nowhere = NumbersRecord(1, "activation", "hot", "fp16", 1.0, Numbers(tuple(bins), 0.0, 4, False))
    (table,) = (
        line for line in lines(TrainingRun(recorded().run.header, (), (nowhere,))) if isinstance(line, Table)
    )
    largest = next(column for column in table.columns if column.header == "largest")
    assert list(largest.cells) == ["-"]


def test_only_what_was_recorded_is_in_the_text() -> None:
    run = replace(recorded().run, numbers=(), lost=(), casts=(), steps=(), problems=("half of it is gone",))
    assert not any(isinstance(line, Table) for line in lines(run))
    assert "! half of it is gone" in lines(run)


def test_the_json_holds_all_figures_and_all_records() -> None:
    made = recorded()
    found = json.loads(json.dumps(training_json(made.run), allow_nan=False))
    assert found["verdict"]["headline"] == verdict(made.run).headline
    (hot,) = (one for one in found["modules"] if (one["module"], one["kind"]) == ("hot", "activation"))
    array = numpy.concatenate([a for _, a in made.arrays("activation", "hot")])
    assert hot["not_finite"] == numpy.mean(~numpy.isfinite(array))
    assert hot["count"] == array.size
    finite = numpy.abs(array[numpy.isfinite(array) & (array != 0)])
    exponents, counts = numpy.unique(numpy.floor(numpy.log2(finite)), return_counts=True)
    assert hot["exponents"] == {str(int(e)): n for e, n in zip(exponents, counts.tolist(), strict=True)}
    assert set(hot["formats"]) == set(WHAT_IF)
    assert len(found["scale_history"]) == sum(
        not one.stepped or one.next_scale != one.scale for one in made.run.steps
    )
    assert len(found["cast_totals"]) == STEPS // EVERY
    back = [parse_line(json.dumps(record)) for record in found["records"]]
    again = collect_training(made.run.header, back[1:])
    assert back[0] == made.run.header
    assert repr(again) == repr(made.run)


def test_a_comparison_as_json() -> None:
    run = replace(RUN, drifts=(DRIFT,), weights=(WeightsRecord("bf16", 0, 3, (0.5, math.inf)),))
    found = json.loads(json.dumps(comparison_json(run), allow_nan=False))
    assert [row["row"] for row in found["rows"]] == ["fp32", "bf16", "fp16", "fp16-unscaled"]
    assert found["rows"][-1]["train_loss"]["mean"] == "nan"
    assert math.isclose(found["rows"][1]["test_accuracy"]["mean"], 0.981)
    assert [repr(parse_line(json.dumps(record))) for record in found["records"]] == [
        repr(one)
        for one in (
            run.header,
            *run.steps,
            *run.epochs,
            *run.results,
            *run.failures,
            *run.explanations,
            *run.choices,
            *run.drifts,
            *run.weights,
        )
    ]
