"""Tables for terminals: nothing is cut at any width."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made_up_run import RUN
from rich.console import Console

from floatplan.cli.compare import show
from floatplan.report.text import device_lines, device_table, machine_lines
from floatplan.tune import Device, FormatFacts, Machine


def printed(width: int, *things: object) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        for thing in things:
            console.print(thing)
    return console.export_text()


@pytest.mark.parametrize(("width", "upright"), [(80, True), (200, False)])
def test_a_comparison_fits_the_terminal(tmp_path: Path, width: int, upright: bool) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        show(RUN, tmp_path, console)
    text = console.export_text()
    for value in ("0.450 ± 0.212", "32,768", "fp16-unscaled"):
        assert value in text
    assert ("│ accuracy" in text) == upright
    assert "…" not in text


def test_a_machine_fits_a_small_terminal() -> None:
    formats = (
        FormatFacts("fp32", "vector", 1.2345e14, 1.5e11),
        FormatFacts("fp8_e4m3", "unknown", 1.1e15, 9e8),
    )
    device = Device("cuda:0", "made up", ("compute capability 9.0",), 2**34, 4.2e12, formats)
    text = printed(80, device_table(device))
    assert "…" not in text
    for value in ("123 TFLOP/s", "8.9 x", "0.006 x", "150 GFLOP/s"):
        assert value in text
    assert device_lines(device) == (
        "features: compute capability 9.0",
        "memory: 16.00 GiB, copied at 4.20 TB/s (read plus written)",
    )


@pytest.mark.parametrize(("load", "said"), [(None, False), (0.1, False), (0.9, True)])
def test_other_work_on_the_machine_is_named(load: float | None, said: bool) -> None:
    lines = machine_lines(Machine("Linux", {"torch": "2.13.0"}, 2, None, (), load))
    assert lines[0] == "torch 2.13.0"
    assert any("was busy" in line for line in lines) == said
    assert any("none found (set CXX or install g++)" in line for line in lines)
