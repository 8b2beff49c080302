"""How many random sequences a run tries."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sequences",
        type=int,
        default=0,
        help="random sequences of training steps; the default is a few, the same each time",
    )
