"""What a training shows while it goes."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from recorded import STEPS, recorded
from rich.console import Console

from floatplan.records import TrainedStep, TrainingHeader
from floatplan.report.live import Course, LiveLine, PlainLines, view_for


def console(terminal: bool, width: int = 300) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def printed(where: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", where.file.getvalue())  # type: ignore[attr-defined]


def step(number: int, **more: object) -> TrainedStep:
    values = {"loss": 0.5, "seconds": 0.25, **more}
    return TrainedStep(number, True, "stepped", 1.0, 1.0, None, None, 0, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_skips_findings_and_the_last_step_are_shown(terminal: bool) -> None:
    made, where = recorded(), console(terminal)
    view = view_for(where, STEPS)
    assert isinstance(view, LiveLine if terminal else PlainLines)
    with view:
        view.write(made.run.header)
        for record in made.records:
            view.write(record)
        view.flush()
    text = printed(where)
    assert "Net in fp16 on cpu" in text
    for one in made.run.steps:
        said = f"step {one.step} skipped: {one.reason} ({one.culprit}), scale {one.scale:,.0f} to"
        assert (said in text) != one.stepped
    assert f"step {STEPS}: In the batch" in text
    last = made.run.steps[-1]
    skipped = sum(not one.stepped for one in made.run.steps)
    assert f"loss {last.loss:.3f}  scale {last.scale:,.0f}" in text
    assert f"skipped {skipped}" in text
    assert "highest risk: hot, activations: not finite" in text
    assert text.rstrip().count("\n") < 2 * STEPS or terminal


def test_plain_lines_come_every_so_many_steps_and_at_the_end() -> None:
    where = console(False)
    with PlainLines(where, every=10) as view:
        for number in range(1, 26):
            view.write(step(number))
    assert [line.split()[1] for line in printed(where).splitlines()] == ["10", "20", "25"]


def test_steps_per_second_are_those_of_the_steps_themselves() -> None:
    course = Course()
    assert course.text() == "waiting for the first step"
    course.note(step(1, seconds=None))
    assert course.rate is None
    for number in range(2, 6):
        course.note(step(number))
    assert course.rate == 4.0
    assert course.text() == "loss 0.500  skipped 0  4.00 steps/s"


def test_memory_and_the_time_to_the_last_step_are_shown_where_they_are_known() -> None:
    course = Course(steps=365, memory=lambda: 3 * 2**20)
    for number in range(1, 6):
        course.note(step(number))
    assert course.text() == "loss 0.500  skipped 0  4.00 steps/s  memory 3 MiB  0:01:30 left"


def test_what_is_not_known_is_not_shown() -> None:
    course = Course()
    course.note(step(1, loss=None, seconds=None))
    assert course.text() == "skipped 0"
    course.note(step(2, loss=math.nan, seconds=None))
    assert course.text() == "loss nan  skipped 0"


def test_the_risk_is_that_of_the_last_recorded_step() -> None:
    made = recorded()
    course = Course()
    course.note(made.run.header)
    safe = [one for one in made.records if getattr(one, "module", "") == "head"]
    for record in safe:
        course.note(record)
    course.settle()
    assert course.risk == "none"
    for record in made.records:
        course.note(record)
    course.settle()
    assert course.risk == "hot, activations: not finite"


def test_each_step_is_judged_by_its_own_numbers() -> None:
    made = recorded()
    course = Course()
    course.note(made.run.header)
    numbers = [one for one in made.run.numbers if one.what == "activation"]
    first, second = sorted({one.step for one in numbers})[:2]
    for record in numbers:
        if record.step == first or (record.step == second and record.name == "head"):
            course.note(record)
    assert course.risk == "hot, activations: not finite"
    course.settle()
    assert course.risk == "none"


def test_a_training_that_goes_on_says_from_where() -> None:
    where = console(False)
    header = recorded().run.header
    again = TrainingHeader(**{name: getattr(header, name) for name in header.__slots__} | {"after": 40})
    with PlainLines(where) as view:
        view.write(again)
    assert printed(where) == "Net in fp16 on cpu, from step 40 on\n"


def test_a_narrow_terminal_cuts_the_end_and_not_the_step() -> None:
    where = console(terminal=True, width=60)
    with LiveLine(where) as view:
        view.write(recorded().run.header)
        view.write(replace(step(12345), grad_norm=1.0, scale=65536.0))
        view.flush()
    last = printed(where).strip().splitlines()[-1]
    assert last.startswith("step 12,345  ")
    assert "loss 0.500" in last
