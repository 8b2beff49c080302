"""The plots as data, and the page as one file that needs nothing else."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_run import HEADER, RECORDS, RUN

from floatplan.records import StepRecord
from floatplan.report.html import PlotlyMissing, render, write_report
from floatplan.report.plots import MOST_POINTS, figures, log_axis, loss_curves, scale_history
from floatplan.report.runfile import collect

COLOURS = dict.fromkeys(HEADER.rows, "#123456")


def test_there_is_a_figure_for_everything_measured() -> None:
    assert [figure.name for figure in figures(RUN)] == ["loss", "scale", "time", "memory", "accuracy"]


def test_plotly_itself_accepts_every_figure() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    for figure in figures(RUN):
        assert len(go.Figure(data=figure.traces, layout=figure.layout).data) == len(figure.traces)


def test_several_seeds_give_a_strong_mean_and_faint_lines() -> None:
    lines = [trace for trace in loss_curves(RUN, COLOURS).traces if trace["name"] == "fp32"]
    assert [trace.get("opacity", 1) for trace in lines] == [0.3, 0.3, 1]
    assert lines[-1]["y"] == pytest.approx([0.5, 0.25, 0.5 / 3])


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    (line,) = (trace for trace in loss_curves(RUN, COLOURS).traces if trace["name"] == "fp16-unscaled")
    assert line["y"] == [None, None, None]
    json.dumps([figure.traces for figure in figures(RUN)], allow_nan=False)


def test_long_runs_are_thinned_to_means() -> None:
    steps = [StepRecord("fp32", 0, 1, step, float(step)) for step in range(1, 2 * MOST_POINTS + 1)]
    header = replace(HEADER, rows=("fp32",), seeds=(0,))
    (line,) = loss_curves(collect(header, [*steps]), COLOURS).traces
    assert len(line["x"]) == MOST_POINTS
    assert line["x"] == line["y"]
    assert line["x"][:2] == [1.5, 3.5]


def test_a_short_logarithmic_axis_has_ticks_that_can_be_read() -> None:
    axis = log_axis([{"y": [0.5, None, 30.0, 0, -1.0]}], "y")
    assert axis["ticktext"] == ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20", "50"]
    assert [float(text) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"])
    assert log_axis([{"y": [2.12, 2.41]}], "y")["ticktext"] == [
        "2.1",
        "2.15",
        "2.2",
        "2.25",
        "2.3",
        "2.35",
        "2.4",
        "2.45",
    ]
    assert log_axis([{"y": [3.0, 7.0]}], "y")["ticktext"] == ["3", "4", "5", "6", "7"]
    assert log_axis([{"y": [0.8]}], "y")["ticktext"] == ["0.8"]
    assert log_axis([{"y": [0.5, 3000.0]}], "y") == {"type": "log"}
    assert log_axis([{"y": [None]}], "y") == {"type": "log"}


def test_the_scale_shows_its_stairs_and_marks_each_skip() -> None:
    stairs, marks, *_ = scale_history(RUN, COLOURS).traces
    assert (stairs["x"], stairs["y"]) == ([1, 3, 3], [65536.0, 32768.0, 32768.0])
    assert (marks["x"], marks["text"]) == ([2], ["overflow in <layer>"])


def test_deviations_are_error_bars() -> None:
    time = next(figure for figure in figures(RUN) if figure.name == "time")
    assert time.traces[0]["error_y"]["array"][0] > 0


def test_a_run_that_was_stopped_early_has_a_page() -> None:
    pytest.importorskip("plotly")
    assert "No training finished." in render(collect(HEADER, RECORDS[:2]))


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    plotlyjs = pytest.importorskip("plotly.offline").get_plotlyjs()
    page = render(RUN)
    assert page.count(plotlyjs) == 1
    own = page.replace(plotlyjs, "")
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(", own)
    assert "prefers-color-scheme: dark" in own
    assert own.index("conclusion") < own.index("<table>") < own.index('id="loss"')


def test_texts_of_a_run_cannot_break_the_page() -> None:
    plotlyjs = pytest.importorskip("plotly.offline").get_plotlyjs()
    own = render(RUN).replace(plotlyjs, "")
    assert "digits &lt;/script&gt; &amp; more" in own
    assert own.count("<script") == own.count("</script>") == 3
    data = re.search(r'<script id="figures" type="application/json">(.*?)</script>', own, re.DOTALL)
    assert data is not None
    assert len(json.loads(data.group(1))) == 5


def test_without_plotly_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PlotlyMissing, match="pip install plotly"):
        write_report(RUN, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_page_says_what_ran_in_which_precision_for_rows_that_have_it() -> None:
    page = render(RUN)
    (part,) = re.findall(r"<details>.*?</details>", page, re.DOTALL)
    assert "bf16: 1 operator call (1 in bfloat16)" in part
    assert "class &lt;lower&gt; of policy unified" in part
    assert "<details>" not in render(replace(RUN, explanations=()))
