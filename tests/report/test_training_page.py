"""The page of a training: every figure against NumPy on the same tensors; one file that asks for nothing."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pages import Shown, Table, plots, tables, without_plotly
from recorded import EVERY, STEPS, recorded

from floatplan.formats import FORMATS
from floatplan.records import Numbers, NumbersKind, NumbersRecord
from floatplan.records.numbers import WHAT_IF, boundaries
from floatplan.report.heatmap import MOST_FRAMES, MOST_LINES, heat_map, limits
from floatplan.report.ranges import module_rows
from floatplan.report.runfile import TrainingRun
from floatplan.report.training import render_training, write_training_report
from floatplan.report.training_plots import MOST_STRETCHES, lines_of, step_figures, time_figure
from floatplan.report.training_tables import MOST_LINES as MOST_ROWS
from floatplan.report.training_tables import NAMES, risk_part

pytest.importorskip("plotly")
KIND = {words: kind for kind, words in NAMES.items()}


@functools.cache
def page() -> str:
    return render_training(recorded().run)


@functools.cache
def shown() -> dict[str, Table]:
    return tables(page())


@functools.cache
def drawn() -> dict[str, Any]:
    return plots(page())


def taken(what: NumbersKind, module: str) -> list[tuple[int, numpy.ndarray]]:
    """(step, numbers) that count: gradients of skipped steps do not."""
    skipped = {one.step for one in recorded().run.steps if not one.stepped}
    return [
        (step, array)
        for step, array in recorded().arrays(what, module)
        if not ("gradient" in what and step in skipped)
    ]


def percent(text: str) -> float:
    return float(text.removesuffix(" %")) / 100


# --- The table of modules --------------------------------------------------------------------------------


def test_the_table_of_modules_is_numpys() -> None:
    table = shown()["risks"]
    assert len(table.rows) == len(module_rows(recorded().run))
    for row in table.rows:
        module = "" if row[0].text == "(the model)" else row[0].text
        what = KIND[row[1].text]
        array = numpy.concatenate([numbers for _, numbers in taken(what, module)])  # type: ignore[arg-type]
        finite = numpy.abs(array[numpy.isfinite(array)])
        largest = float(finite.max())
        _same(row[table.column("largest")], largest)
        _same(row[table.column("zeros")], numpy.mean(array == 0))
        _same(row[table.column("not finite")], numpy.mean(~numpy.isfinite(array)))
        for number, name in enumerate(WHAT_IF):
            room, past, gone = (row[table.column(c, number)] for c in ("room", "too large", "become 0"))
            if largest:
                _same(room, math.log2(FORMATS[name].max) - math.log2(largest))
            if past.value is not None and name != row[2].text:
                limit = 464 if name == "fp8_e4m3" else _overflows_at(name)
                above = finite > limit if name == "fp8_e4m3" else finite >= limit
                _same(past, above.sum() / array.size)
            if gone.value is not None:
                below = (finite > 0) & (finite <= FORMATS[name].smallest_subnormal / 2)
                _same(gone, below.sum() / array.size)
            else:
                assert (row[2].text, name) in {("fp16", "fp16"), ("fp16", "bf16")}
                assert gone.text == "-"


def _overflows_at(name: str) -> float:
    """Half way from the largest number to what would be the next."""
    format = FORMATS[name]
    return format.max + 2.0 ** (math.floor(math.log2(format.max)) - format.mantissa_bits) / 2


def _same(cell: Shown, value: float) -> None:
    """The number that is sorted by is exactly that; the text says it to its digits."""
    assert cell.value == pytest.approx(value, rel=1e-12, abs=0)
    said = cell.text.replace(",", "")
    read = percent(said) if said.endswith("%") else float(said)
    assert read == pytest.approx(value, rel=0.06, abs=0.0501 if not said.endswith("%") else 0)


def test_lost_updates_in_the_table_are_numpys() -> None:
    table = shown()["risks"]
    for row in table.rows:
        cells = [row[table.column("lost updates", number)] for number in range(len(WHAT_IF))]
        own = row[table.column("lost, own")]
        if row[1].text != "updates":
            assert {cell.text for cell in (*cells, own)} == {"-"}
            continue
        mine = [
            triple
            for named in recorded().weights.values()
            for name, triple in named.items()
            if name.rpartition(".")[0] == row[0].text
        ]
        count = sum(int((g != 0).sum()) for _, _, g in mine)
        kept = {
            "own": lambda array: array,
            "fp16": lambda array: array.astype(numpy.float16),
            "bf16": lambda array: torch.from_numpy(array).bfloat16().float().numpy(),
        }
        lost = {
            name: sum(int(((of(b) == of(a)) & (g != 0)).sum()) for b, a, g in mine) / count
            for name, of in kept.items()
        }
        assert own.value == lost["own"]
        by_format = dict(zip(WHAT_IF, cells, strict=True))
        assert (by_format["fp16"].value, by_format["bf16"].value) == (lost["fp16"], lost["bf16"])
        assert by_format["fp8_e4m3"].text == "-"


def test_the_riskiest_stand_first() -> None:
    table = shown()["risks"]
    scores = [row[table.column("risk", WHAT_IF.index("fp16"))].value for row in table.rows]
    assert scores == sorted(scores, key=lambda score: -(score or 0))
    assert [row[0].text for row in table.rows[:2]] == ["hot", "wide"]


# --- The heat map ----------------------------------------------------------------------------------------


def test_the_heat_map_is_numpys_for_each_kind_and_stretch_of_steps() -> None:
    heat = drawn()["heat"]
    kinds = list(dict.fromkeys(row.what for row in module_rows(recorded().run)))
    steps = sorted(recorded().raw)
    assert len(heat["frames"]) == len(kinds) * (1 + len(steps))
    assert len(steps) == MOST_FRAMES
    for name, frame in heat["frames"].items():
        kind, place = map(int, name.split("|"))
        for line, module in enumerate(frame["traces"][0]["y"]):
            numbers = taken(kinds[kind], "" if module == "(the model)" else module)
            numbers = [(s, a) for s, a in numbers if place == 0 or s == steps[place - 1]]
            array = numpy.concatenate([a for _, a in numbers]) if numbers else numpy.array([1.0])
            of = [0] if not numbers else [array.size]
            found = {
                x: value
                for x, value in zip(frame["traces"][0]["x"], frame["traces"][0]["z"][line], strict=True)
                if value is not None
            }
            finite = numpy.abs(array[numpy.isfinite(array) & (array != 0)]) if numbers else numpy.array([])
            exponents, counts = numpy.unique(numpy.floor(numpy.log2(finite)), return_counts=True)
            assert list(found) == [int(e) for e in exponents]
            assert list(found.values()) == pytest.approx(list(100 * counts / of[0]), rel=1e-3)
            if numbers:
                zeros, infinite = (frame["traces"][part]["z"][line][0] or 0 for part in (1, 2))
                assert zeros == pytest.approx(100 * numpy.mean(array == 0), rel=1e-3)
                assert infinite == pytest.approx(100 * numpy.mean(~numpy.isfinite(array)), rel=1e-3)


def test_the_limits_of_formats_are_drawn_where_they_are() -> None:
    heat = drawn()["heat"]
    low, high = heat["traces"][0]["x"][0], heat["traces"][0]["x"][-1]
    places = {shape["x0"] + 0.5 for shape in heat["layout"]["shapes"]}
    assert places == {place for place, _, _ in limits(low, high)}
    for name in ("fp16", "fp8_e4m3", "fp8_e5m2"):
        format = FORMATS[name]
        for value in (format.max, format.smallest_normal, format.smallest_subnormal):
            assert math.log2(value) in places
    bars = [trace for trace in heat["traces"] if trace.get("yaxis") == "y2" and trace["y"][0] == "fp16"]
    assert [trace["x"] for trace in bars] == [
        [-24.5, pytest.approx(15.5, abs=0.01)],
        [-14.5, pytest.approx(15.5, abs=0.01)],
    ]
    assert "fp16: 65504, 6.1e-05, 5.96e-08" in page()


def test_a_large_model_and_many_steps_stay_a_small_page() -> None:
    bins = tuple(int(low == 1.0) for low in (0.0, *boundaries()))
    names = tuple(f"blocks.{n}.{'a_rather_long_name_' * 3}" for n in range(2 * MOST_LINES))
    numbers = tuple(
        NumbersRecord(step, "activation", name, "bf16", 1.0, Numbers(bins, 1.0 + place))
        for step in range(1, 100)
        for place, name in enumerate(names)
    )
    run = TrainingRun(replace(recorded().run.header, modules=names), numbers=numbers)
    figure = heat_map(run, module_rows(run), "fp16")
    assert figure is not None
    lines = figure.frames["0|0"]["traces"][0]["y"]
    assert len(lines) == len(set(lines)) == MOST_LINES
    assert max(map(len, lines)) <= 28
    assert lines[0].startswith(f"blocks.{MOST_LINES}."), (
        "those with the least room, in the order of the model"
    )
    assert len(figure.choices[1].options) == 1 + math.ceil(99 / math.ceil(99 / MOST_FRAMES))
    assert figure.choices[1].options[1] == "steps 1 to 9"
    assert f"the {MOST_LINES} modules" in figure.caption


def test_a_long_table_keeps_those_at_the_highest_risk() -> None:
    (hot,) = (row for row in module_rows(recorded().run) if row.module == "hot" and row.what == "activation")
    (head,) = (
        row for row in module_rows(recorded().run) if row.module == "head" and row.what == "activation"
    )
    part = risk_part([head] * MOST_ROWS + [hot], "fp16")
    assert part.count("<tr") == 1 + MOST_ROWS
    assert part.index(">hot<") < part.index(">head<")
    assert "Shown are the 500 of 501 lines at the highest risk in fp16" in part
    assert "Shown are" not in risk_part([head, hot], "fp16")


# --- Steps -----------------------------------------------------------------------------------------------


def test_losses_scales_and_their_marks() -> None:
    steps = recorded().run.steps
    curve, skips = drawn()["loss"]["traces"]
    assert (curve["x"], curve["y"]) == ([s.step for s in steps], [s.loss for s in steps])
    skipped = [one for one in steps if not one.stepped]
    assert (skips["x"], skips["y"]) == ([s.step for s in skipped], [s.loss for s in skipped])
    stairs, *marks = drawn()["scale"]["traces"]
    at = dict(zip(stairs["x"], stairs["y"], strict=True))
    scale = 0.0
    for one in steps:
        scale = at.get(one.step, scale)
        assert scale == one.scale
    assert {mark["name"]: len(mark["x"]) for mark in marks} == {
        "skipped": len(skipped),
        "grew": sum((s.next_scale or 0) > s.scale for s in steps),
    }
    text, last = marks[0]["text"][-1].replace("<br>", " "), skipped[-1]
    assert text == f"{last.scale:,.0f} to {last.next_scale:,.0f} {last.reason} in {last.culprit}"
    norms = [one.grad_norm if math.isfinite(one.grad_norm or 0) else None for one in steps]
    assert drawn()["norm"]["traces"][0]["y"] == norms


def test_times_are_numpys_medians() -> None:
    timed = [one for one in recorded().run.steps if one.seconds is not None]
    assert len(timed) == STEPS - STEPS // EVERY
    seconds = numpy.array([one.seconds for one in timed])
    parts = numpy.array([[one.forward_seconds, one.backward_seconds, one.step_seconds] for one in timed])
    columns = [seconds, *parts.T, seconds - parts.sum(axis=1)]
    rows = shown()["times"].rows
    for row, values in zip(rows, columns, strict=True):
        assert row[1].value == pytest.approx(numpy.median(values))
        assert float(row[1].text.removesuffix(" ms")) == pytest.approx(1e3 * numpy.median(values), rel=0.01)
        assert row[2].value == pytest.approx(values.sum() / seconds.sum())
    lines = drawn()["time"]["traces"]
    assert [trace["name"] for trace in lines] == ["forward", "backward", "step", "rest"]
    for trace, values in zip(lines, columns[1:], strict=True):
        assert trace["y"] == pytest.approx(list(1e3 * values))


def test_many_times_are_medians_of_stretches() -> None:
    (first, *_) = (one for one in recorded().run.steps if one.seconds is not None)
    steps = [
        replace(
            first,
            step=n,
            seconds=4.0,
            forward_seconds=9.0 * (n % 3 == 0),
            backward_seconds=0.0,
            step_seconds=0.0,
        )
        for n in range(1, 3 * MOST_STRETCHES + 1)
    ]
    figure = time_figure(steps)
    assert figure is not None
    assert figure.traces[0]["y"] == [0.0] * MOST_STRETCHES
    assert figure.traces[3]["y"] == [4000.0] * MOST_STRETCHES


# --- Casts -----------------------------------------------------------------------------------------------


def test_casts_are_numpys_bytes() -> None:
    made = recorded().casts
    table = shown()["casts"]
    *rows, total = table.rows
    everything = 0.0
    for row in rows:
        cast = [pair for of_module in made.values() for pair in of_module[row[0].text]]
        size = sum(source.nbytes + target.nbytes for source, target in cast) / len(made)
        assert (row[4].value, row[5].value) == (len(cast) / len(made), size)
        assert [cell.text for cell in row[1:4]] == ["fp32", "fp16", "weight"]
        everything += size
    assert total[5].value == pytest.approx(everything)
    assert [row[5].value for row in rows] == sorted((row[5].value or 0.0 for row in rows), reverse=True)


# --- The page --------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    own = without_plotly(page())
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(", own)
    assert (
        own.index("conclusion") < own.index('class="said"') < own.index('id="loss"') < own.index('id="risks"')
    )
    assert len(own) < 1_500_000


def test_texts_of_a_run_cannot_break_the_page() -> None:
    header = replace(recorded().run.header, model="</script><b>", notes=("<i>",), machine={"<u>": "</style>"})
    numbers = tuple(replace(one, name="<x>") for one in recorded().run.numbers if one.what == "activation")
    steps = tuple(replace(one, reason="<z>", culprit="<y>") for one in recorded().run.steps)
    own = without_plotly(render_training(TrainingRun(header, steps, numbers, problems=("<p>",))))
    assert own.count("<script") == own.count("</script>") == 3
    for bad in ("</script><b>", "<i>", "<u>", "<x>", "<y>", "<z>"):
        assert bad not in re.sub(r"<script.*?</script>", "", own, flags=re.DOTALL)
    for name, figure in plots(own).items():
        assert not re.search(r"<[xyz]>", json.dumps(figure)), name


def test_plotly_itself_accepts_every_figure() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    for figure in drawn().values():
        for frame in figure["frames"].values() or [{"traces": [], "layout": {}}]:
            changed = [*frame["traces"], *[{}] * len(figure["traces"])]
            traces = [{**t, **c} for t, c in zip(figure["traces"], changed, strict=False)]
            assert go.Figure(data=traces, layout={**figure["layout"], **frame["layout"]})


def test_what_was_not_recorded_is_not_on_the_page() -> None:
    run = replace(recorded().run, numbers=(), lost=(), casts=(), findings=())
    own = render_training(run)
    assert set(tables(own)) == {"times"}
    assert set(plots(own)) == {"loss", "scale", "norm", "time"}
    assert "No numbers were recorded" in own
    bare = render_training(TrainingRun(run.header))
    assert "No step was recorded." in bare
    assert plots(bare) == {}


def test_problems_of_the_file_and_notes_are_told() -> None:
    own = render_training(replace(recorded().run, problems=("line 7 cannot be read",)))
    assert '<ul class="problems"><li>line 7 cannot be read</li></ul>' in own
    assert '<ul class="notes"><li>the inside of compiled modules is not seen</li></ul>' in own


def test_a_training_without_scaling_has_no_plot_of_it() -> None:
    steps = tuple(replace(one, scale=1.0, next_scale=1.0, stepped=True) for one in recorded().run.steps)
    assert [figure.name for figure in step_figures(lines_of({"": replace(recorded().run, steps=steps)}))] == [
        "loss",
        "norm",
    ]


def test_it_is_written_into_the_run_folder(tmp_path: Path) -> None:
    path = write_training_report(recorded().run, tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == page()
