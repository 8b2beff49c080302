"""An explanation as text, table, JSON and page; without torch."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import floatplan as fp
from floatplan.records import ExplainedOperator, Explanation
from floatplan.report.explanation import (
    data_size,
    explanation_page,
    explanation_part,
    explanation_reasons,
    explanation_table,
    write_explanation,
)
from floatplan.report.page import STYLE

F32, BF16 = ("float32",), ("bfloat16",)
EXPLANATION = Explanation(
    "Net",
    "cpu",
    "bfloat16",
    "unified",
    (
        ExplainedOperator("up", "Linear", "aten::linear", F32, "bfloat16", BF16, "product", 2, 3, 3072),
        ExplainedOperator("up", "Linear", "aten::relu", BF16, "bfloat16", BF16, "left alone", 1, 0, 0),
        ExplainedOperator("", "Net", "aten::add.Tensor", F32, "float32", F32, "left alone", 1, 0, 0),
        ExplainedOperator("<up>", "Li&n", "aten::linear", F32, "bfloat16", BF16, "product", 1, 1, 12),
    ),
)


def text(by: str = "call", width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(explanation_table(EXPLANATION, by))
    return captured.get()


def test_print_gives_sentences_module_by_module() -> None:
    assert str(EXPLANATION).splitlines() == [
        "Net on cpu in bfloat16, policy unified: "
        "5 operator calls (4 in bfloat16, 1 in float32); 4 casts, 3,084 bytes read and written",
        "up (Linear)",
        "  aten::linear ran 2 times in bfloat16 (float32 to bfloat16): product; "
        "3 casts, 3,072 bytes read and written",
        "  aten::relu ran in bfloat16 (bfloat16 to bfloat16): left alone",
        "Net",
        "  aten::add.Tensor ran in float32 (float32 to float32): left alone",
        "<up> (Li&n)",
        "  aten::linear ran in bfloat16 (float32 to bfloat16): product; 1 cast, 12 bytes read and written",
    ]
    assert repr(EXPLANATION) == f"<Explanation of {str(EXPLANATION).splitlines()[0]}>"


def test_an_empty_explanation_can_be_shown() -> None:
    empty = Explanation("Identity", "cpu", None, None, ())
    assert str(empty) == "Identity on cpu in its own regions: 0 operator calls (none); 0 casts, 0 bytes " + (
        "read and written"
    )
    assert explanation_table(empty).row_count == 0
    assert "0 operator calls" in explanation_page(empty)


def test_the_table_has_a_line_per_row_and_names_reasons_by_number() -> None:
    lines = text().splitlines()
    assert lines[0].startswith("Net on cpu in bfloat16")
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [
        ["up (Linear)", "linear", "2", "float32", "bfloat16", "bfloat16", "3", "3 KiB", "1"],
        ["up (Linear)", "relu", "1", "bfloat16", "bfloat16", "bfloat16", "", "", "2"],
        ["Net", "add.Tensor", "1", "float32", "float32", "float32", "", "", "2"],
        ["<up> (Li&n)", "linear", "1", "float32", "bfloat16", "bfloat16", "1", "12 B", "1"],
    ]
    assert explanation_reasons(EXPLANATION) == ("1: product", "2: left alone")


def test_lines_may_be_modules_or_operators() -> None:
    assert re.search(r"│ up \(Linear\) +│ +3 │ 3 bfloat16 +│ +3 │ +3 KiB │", text("module"))
    assert re.search(r"│ linear +│ +3 │ 3 bfloat16 +│ +4 │ +3.01 KiB │", text("operator"))


def test_a_narrow_terminal_loses_nothing() -> None:
    assert all(len(line) <= 60 for line in text(width=60).splitlines())
    assert "…" not in text(width=60)


def test_json_holds_everything() -> None:
    back = json.loads(json.dumps(EXPLANATION.as_dict()))
    assert set(back) == {"model", "device_type", "dtype", "policy", "rows", "totals"}
    assert back["rows"][0] == {
        "module": "up",
        "module_type": "Linear",
        "operator": "aten::linear",
        "input_dtypes": ["float32"],
        "ran_in": "bfloat16",
        "output_dtypes": ["bfloat16"],
        "why": "product",
        "times": 2,
        "casts": 3,
        "cast_bytes": 3072,
    }
    assert (back["totals"]["times"], back["totals"]["casts"], back["totals"]["cast_bytes"]) == (5, 4, 3084)


def test_a_frozen_value_that_copies_and_pickles() -> None:
    assert copy.deepcopy(EXPLANATION) == EXPLANATION == pickle.loads(pickle.dumps(EXPLANATION))
    assert isinstance(EXPLANATION, fp.Explanation)
    with pytest.raises(AttributeError):
        EXPLANATION.model = "other"  # type: ignore[misc]


def test_the_page_is_one_file_in_the_look_of_a_report(tmp_path: Path) -> None:
    page = write_explanation(EXPLANATION, tmp_path / "explain.html").read_text(encoding="utf-8")
    assert STYLE in page
    assert explanation_part(EXPLANATION) in page
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|<script", page)
    assert "&lt;up&gt; (Li&amp;n)" in page
    assert "<up>" not in page
    assert page.index("Modules") < page.index("Operators") < page.index("add.Tensor")


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(fp.FloatplanError, match=r"cannot write .*explain\.html: No such file"):
        write_explanation(EXPLANATION, tmp_path / "no" / "explain.html")


@pytest.mark.parametrize(
    ("size", "said"), [(0, ""), (1, "1 B"), (1023, "1023 B"), (2**20, "1 MiB"), (1.5e12, "1,397 GiB")]
)
def test_sizes_in_words(size: float, said: str) -> None:
    assert data_size(size) == said


def test_showing_needs_no_torch() -> None:
    script = (
        "import sys, floatplan.report.explanation, floatplan; floatplan.Explanation; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
