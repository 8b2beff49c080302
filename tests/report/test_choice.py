"""A choice in words and on the page."""

from __future__ import annotations

import json
from dataclasses import replace

from made_up_run import HEADER, RECORDS

from floatplan.records import Choice, ChoiceRecord, ModuleChoice
from floatplan.report.html import render
from floatplan.report.runfile import collect

BODY, HEAD = ModuleChoice("body", 0, "bf16", 0.004, 0.001), ModuleChoice("<head>", 0, "fp32", 0.001, 0.003)
CHOICE = Choice(
    low="bf16",
    precision="bf16",
    plans=('[default]\nprecision = "bf16"\n',),
    full=0.005,
    all_low=0.004,
    chosen=0.0025,
    modules=(BODY, HEAD),
    measured=7,
    found=2,
    left_out={"aten::odd": "its arguments are not plain tensors"},
    costs="kept in costs.json",
)


def test_it_says_what_runs_where_and_what_that_saves() -> None:
    assert CHOICE.gain == 0.5
    assert CHOICE.sentences() == [
        "In fp32: <head>; the rest in bf16. Operators take 2.5 ms a micro-batch in place of float32's 5 ms "
        "and bf16's 4 ms.",
        "7 operator calls were timed, 2 were known (kept in costs.json).",
        "Not timed, and not counted: aten::odd.",
    ]
    low = replace(CHOICE, modules=(BODY,), left_out={})
    assert str(low).startswith("Everything runs in bf16: operators take 2.5 ms")
    full = replace(CHOICE, precision="fp32", modules=(HEAD,))
    assert str(full).startswith(
        "Everything stays in float32: its operators alone take 5 ms a micro-batch, and 4 ms"
    )
    assert "stays in float32" in str(replace(CHOICE, precision="fp32", modules=()))


def test_it_survives_json() -> None:
    assert Choice.from_dict(json.loads(json.dumps(CHOICE.as_dict()))) == CHOICE


def test_the_page_shows_it_with_nothing_that_is_read_as_markup() -> None:
    record = ChoiceRecord("auto", 0, CHOICE)
    page = render(collect(HEADER, [*RECORDS, record]))
    assert "Which precision was chosen" in page
    assert "&lt;head&gt;" in page
    assert "<td>0.25</td>" in page
    assert "<head>;" not in page
