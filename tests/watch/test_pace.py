"""When numbers are counted."""

from __future__ import annotations

import pytest

from floatplan.watch import pace
from floatplan.watch.pace import EVERY, Pace


def due(pace: Pace, steps: int, in_turn: int = 1) -> list[int]:
    """Steps, from 1, whose numbers are counted."""
    found = []
    for step in range(steps):
        if pace.is_due(step, in_turn):
            found.append(step + 1)
            pace.begins()
            pace.ends()
    return found


def test_each_so_many_steps_whatever_it_costs() -> None:
    assert due(Pace(3), 10) == [1, 4, 7, 10]
    assert due(Pace(1), 3) == [1, 2, 3]
    assert due(Pace(2), 9, in_turn=2) == [1, 2, 5, 6, 9]


def test_no_more_often_than_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of this test's: a step takes 1, and 3 if its numbers are counted."""
    clock = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock[0])

    def counted(per_count: float, in_turn: int, steps: int = 2000) -> list[int]:
        known, found = Pace(None), []
        for step in range(steps):
            if known.is_due(step, in_turn):
                found.append(step + 1)
                known.begins()
                clock[0] += per_count
                known.ends()
            else:
                clock[0] += 1.0
        return found

    assert counted(0.4, 1)[:3] == [1, 1 + EVERY, 1 + 2 * EVERY]
    first, second, third = counted(3.0, 1)[:3]
    assert (first, second - first, third - second) == (1, 301, 301)
    assert counted(3.0, 2)[:4] == [1, 2, 603, 604]


def test_a_step_that_is_thrown_away_does_not_count() -> None:
    known = Pace(None)
    assert known.is_due(0, 1)
    known.thrown_away()
    assert known.is_due(0, 1)
    assert not known.is_due(1, 1)
