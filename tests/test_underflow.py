"""The table of docs/scaling.md: what float16 loses without scaling, and keeps with it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "underflow.py"


@pytest.mark.trouble("T11")
def test_scaling_saves_the_gradients_that_float16_loses(figure: Callable[[str], None]) -> None:
    shares = runpy.run_path(str(SCRIPT))["shares"]()
    for name, share in shares.items():
        figure(f"weight-gradient entries lost, loss x 1e-4, {name}: {share:.2%}")
    assert shares["fp16"] > 0.40
    assert shares["fp16 with GradScaler"] < 0.01
    assert shares["bf16"] < 0.01
