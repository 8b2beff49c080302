"""The results of a sequence, each beside what the reference says."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import floatplan as fp
from loss_scale import f32

FIELDS = (
    "stepped",
    "found_inf",
    "reason",
    "scale",
    "next_scale",
    "grad_norm",
    "culprit",
    "skips_in_a_row",
    "value",
)


@dataclass
class Expected:
    """What a result should say; ``grad_norm`` NaN stands for what is not finite."""

    stepped: bool
    found_inf: bool
    reason: str
    scale: float
    grad_norm: float | None = None
    culprit: str | None = None
    skips_in_a_row: int = 0
    value: Any = None
    next_scale: float | None = None


def _all_fields(result: fp.StepResult) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in FIELDS)


def agrees(result: fp.StepResult, expected: Expected, but: Sequence[str] = ()) -> None:
    for name in FIELDS:
        said, known = getattr(result, name), getattr(expected, name)
        if name in but:
            continue
        if name in ("scale", "next_scale") and said is not None:
            said = f32(said)  # before the first loss it is the user's number
        if name == "grad_norm" and known is not None:
            close = not math.isfinite(said) if math.isnan(known) else math.isclose(said, known, rel_tol=1e-6)
            assert close, f"grad_norm is {said}, not {known}"
        else:
            assert said == known or (said != said and known != known), f"{name} is {said!r}, not {known!r}"
    assert bool(result) is expected.stepped


class Ledger:
    """Keeps every result to the end, and what was read of it at once."""

    def __init__(self) -> None:
        self._kept: list[tuple[fp.StepResult, Expected, tuple[Any, ...] | None]] = []

    def add(self, result: fp.StepResult, expected: Expected, read: bool) -> None:
        """Hold ``result`` against ``expected``: now if ``read``, and in any case at the end."""
        if read:
            agrees(result, expected)
        self._kept.append((result, expected, _all_fields(result) if read else None))

    def kinds(self) -> Iterator[str]:
        """What each result was, in a word or two."""
        for _, expected, _ in self._kept:
            yield expected.reason.split(":")[0]

    def check(self) -> None:
        for result, expected, at_once in self._kept:
            agrees(result, expected)
            if at_once is not None:
                for name, before, now in zip(FIELDS, at_once, _all_fields(result), strict=True):
                    assert name == "next_scale" or before == now or (before != before and now != now)
            for other in (copy.copy(result), pickle.loads(pickle.dumps(result))):
                assert repr(other) == repr(result)
