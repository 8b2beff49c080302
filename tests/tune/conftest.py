"""Costs are kept however busy the machine is that runs the tests."""

from __future__ import annotations

import math

import pytest

from floatplan.tune import costs


@pytest.fixture(autouse=True)
def never_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "BUSY", math.inf)
