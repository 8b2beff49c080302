"""What is said of the steps of a training: skips, losses, findings."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from recorded import Recorded, recorded, said

from floatplan.records import (
    FindingRecord,
    TrainedStep,
)
from floatplan.report.runfile import TrainingRun
from floatplan.report.statement import listed
from floatplan.report.timeline import scale_events
from floatplan.report.verdict import verdict


def skips(*stepped: bool) -> TrainingRun:
    steps = tuple(
        TrainedStep(n, good, "stepped" if good else "overflow", 8.0, 8.0, 1.0, None if good else "w", 0, 1.0)
        for n, good in enumerate(stepped, 1)
    )
    return TrainingRun(recorded().run.header, steps)


@pytest.mark.parametrize(
    ("stepped", "level", "words"),
    [
        ((True,) * 10, "good", "The loss scale stayed at 8. No step was skipped."),
        ((False, *(True,) * 9), "good", "1 of 10 steps was skipped, the last at step 1: overflow (w)."),
        ((False, False), "note", "2 of 2 steps were skipped"),
        ((*(True,) * 7, False, False, False), "bad", "The last 3 steps were all skipped."),
        ((*(True,) * 90, *(False, True) * 5), "bad", "10 % of the steps were skipped"),
        ((*(True,) * 10, *(False, True) * 5), "good", "5 of 20 steps were skipped"),
    ],
)
def test_skips_count_by_where_they_stand(stepped: tuple[bool, ...], level: str, words: str) -> None:
    one = said(skips(*stepped), "scale")
    assert one.level == level
    assert words in one.text


@pytest.mark.parametrize(
    ("losses", "level", "words"),
    [
        ((1.0, 2.0), "note", "rose from 1.00 to 2.00"),
        (
            (1.0, math.nan, 0.5),
            "note",
            "was not finite at 1 of 3 steps, first 2, and ends at 0.500. fp.diagnose(",
        ),
        ((1.0, math.inf), "bad", "ends at inf; it was not finite at 1 step, first 2"),
        ((math.nan,), "bad", "ends at nan; it was not finite at 1 step, first 1"),
    ],
)
def test_losses(losses: tuple[float, ...], level: str, words: str) -> None:
    steps = tuple(
        TrainedStep(n, True, "stepped", 1.0, None, None, None, 0, loss) for n, loss in enumerate(losses, 1)
    )
    one = said(TrainingRun(recorded().run.header, steps), "loss")
    assert one.level == level
    assert words in one.text


def test_a_loss_that_is_not_finite_blames_no_parameter() -> None:
    forward = "forward: the loss is not finite, whatever the scale"
    steps = (
        TrainedStep(1, True, "stepped", 8.0, 8.0, 1.0, None, 0, 1.0),
        TrainedStep(2, False, forward, 8.0, 8.0, None, "head.bias", 1, math.nan),
    )
    run = replace(recorded().run, steps=steps, findings=())
    assert "head.bias" not in said(run, "scale").text
    assert scale_events(run)[-1].culprit is None
    assert "fp.diagnose" in said(run, "loss").text
    found = replace(recorded().run, steps=steps)
    assert "fp.diagnose" not in said(found, "loss").text


def test_optimizers_that_step_alone_have_losses_of_their_own() -> None:
    steps = tuple(
        TrainedStep(n, True, "stepped", 2.0, 4.0 if n == 3 else 2.0, None, None, 0, float(n), n % 2)
        for n in range(1, 9)
    )
    run = TrainingRun(recorded().run.header, steps)
    texts = [one.text for one in verdict(run).statements]
    assert any("The loss of optimizer 0 went from 2.00 to 8.00" in text for text in texts)
    assert not any("The loss scale" in text for text in texts)


def test_findings_that_say_the_same_are_one() -> None:
    made: Recorded = recorded()
    (finding,) = made.run.findings
    again = tuple(FindingRecord(step, finding.diagnosis) for step in range(1, 8))
    text = said(replace(made.run, findings=again), "findings").text
    assert re.match(r"Steps 1, 2, 3, 4 and 5 and 2 more: In the batch", text)


def test_lists_are_cut() -> None:
    assert listed(list("abc")) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e and 3 more"
