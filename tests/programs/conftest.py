"""How many programs a run tries."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        default=0,
        help="random programs to run; the default is a few, the same each time",
    )
