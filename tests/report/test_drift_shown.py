"""Distances from float32 in a run file, in words, and on the page."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from made_up_run import HEADER, RECORDS, RUN

from floatplan.records import DriftRecord, WeightsRecord
from floatplan.report.drift import drift_notes, drift_part, weight_traces
from floatplan.report.html import render
from floatplan.report.plots import figures
from floatplan.report.runfile import RunWriter, collect, parse_line, read_run
from floatplan.report.summary import notes

NEAR = DriftRecord("bf16", 0, 1, "bf16", "a", "", 0.004, 0.02, 0.003, 0.05, 0.01)
FAR = replace(NEAR, step=20, module="blocks.<3>", op="aten::_softmax", distance=0.123, gradients=math.inf)
LOST = replace(NEAR, row="fp16", unjudged="float32 takes another way in a")
INFINITE = replace(FAR, step=50, module="", op="", distance=math.inf, output=math.inf)
RUN_WITH = collect(HEADER, [*RECORDS, NEAR, FAR, INFINITE, LOST])
WEIGHTS = (
    WeightsRecord("fp32", 0, 3, (3.0, 4.0)),
    WeightsRecord("bf16", 0, 3, (3.0, 4.5)),
    WeightsRecord("bf16", 0, 6, (3.0, 4.5)),
    WeightsRecord("fp16", 0, 3, (math.nan, math.inf)),
)


def test_only_what_leaves_float32_is_said_of_and_where_it_does_first() -> None:
    assert drift_notes(RUN) == []
    assert drift_notes(collect(HEADER, [NEAR])) == []
    assert drift_notes(RUN_WITH) == [
        "bf16: first leaves float32 at step 20 in blocks.<3> (aten::_softmax): 0.12 where bf16 explains 0.02",
        "fp16: not compared with float32: float32 takes another way in a",
    ]
    assert set(drift_notes(RUN_WITH)) <= set(notes(RUN_WITH))
    (said,) = drift_notes(collect(HEADER, [INFINITE]))
    assert said.endswith("step 50 in the model itself: its result is not finite, and float32's is")


def test_the_page_has_a_table_and_a_figure_without_what_json_cannot_hold() -> None:
    page = render(RUN_WITH)
    assert 'id="drift"' in page
    assert "blocks.&lt;3&gt;, aten::_softmax" in page
    assert "<td>inf</td>" in page
    (figure,) = (figure for figure in figures(RUN_WITH) if figure.name == "drift")
    line, bound = figure.traces
    assert (line["x"], line["y"]) == ([1, 20, 50], [0.003, 0.003, None])
    assert (bound["name"], bound["y"]) == ("bf16: explained", [0.05, 0.05, 0.05])
    assert drift_part(RUN) == ""
    assert 'id="drift"' not in render(RUN)


def test_records_come_back_from_their_lines() -> None:
    for record in (NEAR, FAR, INFINITE, LOST):
        line = {name: str(v) if v == math.inf else v for name, v in asdict(record).items()}
        assert parse_line(json.dumps({"kind": "drift", **line})) == record


def test_weights_are_compared_where_float32_has_them(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(HEADER)
        for record in WEIGHTS:
            writer.write(record)
    back = read_run(tmp_path / "run")
    assert back.weights[:3] == WEIGHTS[:3]
    assert math.isnan(back.weights[3].sample[0])
    assert back.weights[3].sample[1] == math.inf
    bf16, fp16 = weight_traces(back, {"fp32": "#000", "bf16": "#111", "fp16": "#222"})
    assert (bf16["name"], bf16["x"], bf16["y"]) == ("bf16", [3], [0.1])
    assert fp16["y"] == [None]
    (figure,) = (one for one in figures(collect(HEADER, [*RECORDS, *WEIGHTS])) if one.name == "weights")
    assert [trace["name"] for trace in figure.traces] == ["bf16", "fp16"]
