"""Several trainings side by side: of the same model, and of different ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from made_up_run import RUN
from pages import plots, tables, without_plotly
from recorded import recorded

from floatplan.errors import TaskError
from floatplan.report.ranges import module_rows
from floatplan.report.runfile import TrainingRun
from floatplan.report.several import (
    are_alike,
    differences,
    render_trainings,
    trainings_json,
    trainings_of,
    unlike_text,
)
from floatplan.report.several_text import several_lines
from floatplan.watch.histogram import numbers_of


def runs() -> dict[str, TrainingRun]:
    return {"low": recorded().run, "full": recorded("fp32").run}


def unlike() -> dict[str, TrainingRun]:
    other = recorded("fp32").run
    header = replace(other.header, fingerprint="other", model="Bigger", parameters=9000)
    return {"a": recorded().run, "b": replace(other, header=header)}


def test_modules_whose_risk_differs_are_found() -> None:
    assert are_alike(runs())
    found = {(one.module, one.what): one for one in differences(runs(), "fp16")}
    hot = found["hot", "activation"]
    assert [row and row.fits["fp16"].risk for row in hot.rows.values()] == ["not finite", "overflow"]
    assert ("head", "activation") not in found, "at no risk in either"
    spreads = [one.spread for one in differences(runs(), "fp16")]
    assert spreads == sorted(spreads, reverse=True)
    alike = {"one": recorded().run, "two": recorded().run}
    assert differences(alike, "fp16") == ()


def test_of_several_formats_in_one_module_the_worst_counts() -> None:
    made = recorded().run
    (one, *_) = (n for n in made.numbers if n.what == "activation" and n.name == "hot")
    # Beside its fp16 numbers the module has harmless ones in another format, listed before or after them.
    for dtype in ("bf16", "fp32"):
        more = replace(next(n for n in made.numbers if n.name == "head"), name="hot", dtype=dtype)
        both = {"a": replace(made, numbers=(one, more)), "b": replace(made, numbers=(more,))}
        (hot,) = differences(both, "fp16")
        assert [row and row.fits["fp16"].risk for row in hot.rows.values()] == ["not finite", "none"]


def test_no_risk_is_no_difference_however_much_room_there_is() -> None:
    made = recorded().run
    (head, *_) = (n for n in made.numbers if n.what == "activation" and n.name == "head")
    large = replace(head, numbers=numbers_of(torch.tensor([1000.0])))
    assert (
        differences({"a": replace(made, numbers=(head,)), "b": replace(made, numbers=(large,))}, "fp16") == ()
    )


def test_a_module_that_one_did_not_record_is_told() -> None:
    run = recorded().run
    without = replace(run, numbers=tuple(one for one in run.numbers if one.module != "hot"))
    lines = [line for line in several_lines({"a": run, "b": without}) if isinstance(line, str)]
    # There is no risk to compare where only one has numbers, unless it is one.
    assert not any("hot, activations" in line for line in lines)
    found = {(one.module, one.what): one.rows for one in differences({"a": run, "b": without}, "fp16")}
    assert ("hot", "activation") not in found


def test_the_page_of_several() -> None:
    pytest.importorskip("plotly")
    page = render_trainings(runs())
    table = tables(page)["trainings"]
    assert [row[0].text for row in table.rows] == ["low", "full"]
    losses = [one.loss for one in runs()["full"].steps if one.loss is not None]
    assert float(table.rows[1][table.column("first loss")].text) == pytest.approx(
        numpy.mean(losses[:4]), rel=0.01
    )
    assert table.rows[1][table.column("scale at the end")].text == "-"
    drawn = plots(page)
    assert [t["name"] for t in drawn["loss"]["traces"]] == ["low", "full", "low: skipped"]
    assert {"loss", "scale", "norm", "time"} == set(drawn)
    shown = tables(page)["differences"]
    scores = {
        row.module: row.fits["fp16"].score for row in module_rows(runs()["low"]) if row.what == "activation"
    }
    (hot,) = (row for row in shown.rows if (row[0].text, row[1].text) == ("hot", "activations"))
    assert hot[2].value == scores["hot"]
    assert hot[2].text.startswith("not finite")


def test_different_models_are_told_and_what_can_be_is_shown() -> None:
    pytest.importorskip("plotly")
    text = unlike_text(unlike())
    assert "different models" in text
    assert "a: Net with 3,412 parameters (net); b: Bigger with 9,000 parameters (other)" in text
    page = without_plotly(render_trainings(unlike()))
    assert "These are different models" in page
    assert "differences" not in tables(render_trainings(unlike()))
    assert set(plots(page)) == {"loss", "scale", "norm", "time"}
    lines = [line for line in several_lines(unlike()) if isinstance(line, str)]
    assert lines[-1] == text
    assert trainings_json(unlike())["differences"] == {}


def test_a_comparison_among_trainings_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TaskError, match=r"runs/c holds a comparison of rows.*one comparison alone"):
        trainings_of({Path("runs/a"): recorded().run, Path("runs/c"): RUN})


def test_folders_of_the_same_name_are_told_apart() -> None:
    run = recorded().run
    assert list(trainings_of({Path("a/x"): run, Path("b/x"): run, Path("c/y"): run})) == ["a/x", "b/x", "y"]


def test_trainings_that_are_at_the_same_risk_say_so() -> None:
    both = {"one": recorded().run, "two": recorded().run}
    assert "No module is at another risk" in [*several_lines(both)][-1]  # type: ignore[operator]
    pytest.importorskip("plotly")
    assert "No module is at another risk" in render_trainings(both)
