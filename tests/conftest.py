"""Markers, state that a test may not leave behind, and figures that a run prints at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from floatplan import _compiler, _torch
from floatplan.engine import unscaled

FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # Most tests train in float16 without a scaler on purpose; the one of the warning asks for it.
    unscaled._state["settled"] = True
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device (scripts/gpu-check runs it)")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
        for line in config.stash[FIGURES]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line that the run prints at its end, whether or not tests pass."""
    return request.config.stash[FIGURES].append


def autocast_state() -> tuple[object, ...]:
    """Everything of autocast that the calling thread holds."""
    devices = ("cpu", "cuda", _torch.CARRIER)
    return (
        tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
        torch.is_autocast_cache_enabled(),
        _compiler.compile_cache_tag().partition("|")[0],
    )


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """A region's state is gone when its test is over (T62, T64, T65)."""
    before = autocast_state()
    yield
    assert autocast_state() == before
