"""Calls that should warn, or raise and change nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from sequences.optimizers import same


@contextmanager
def warns(words: Sequence[str] = ()) -> Iterator[None]:
    """Exactly these warnings, in order."""
    with warnings_of() as said:
        yield
    check_said(said, words)


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    """A list that has the warnings afterwards."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught]


def check_said(said: Sequence[str], words: Sequence[str]) -> None:
    assert len(said) == len(words), said
    assert all(part in message for part, message in zip(words, said, strict=True)), said


@contextmanager
def changes_nothing(everything: Callable[[], Any]) -> Iterator[None]:
    """``everything`` makes a copy of all there is."""
    before = everything()
    yield
    assert same(before, everything())


@contextmanager
def is_refused(
    everything: Callable[[], Any],
    error: type[BaseException] | tuple[type[BaseException], ...],
    words: str | None = None,
) -> Iterator[None]:
    """A call that raises and changes nothing."""
    with changes_nothing(everything), pytest.raises(error, match=words):
        yield
