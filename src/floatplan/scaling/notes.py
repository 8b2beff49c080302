"""What a scaler keeps of each optimizer beyond an iteration."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from floatplan.errors import FloatplanWarning, users_line

if TYPE_CHECKING:
    from floatplan.scaling.misuse import Watch


@dataclass(slots=True)
class Note:
    """What is known of one optimizer.

    Attributes:
        reference: to the optimizer; None where it takes none.
        told: what it was warned about.
        seen: whether it was ever watched.
        watch: follows its first iterations; None afterwards.
    """

    reference: weakref.ref[torch.optim.Optimizer] | None
    told: set[str] = field(default_factory=set)
    seen: bool = False
    watch: Watch | None = None


class Notes:
    """A `Note` per optimizer, by ``id()``: an optimizer may be a wrapper that cannot be hashed."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> Note:
        """The note of ``optimizer``; a fresh one if it is met for the first time."""
        note = self._notes.get(id(optimizer))
        if note is None or (note.reference is not None and note.reference() is not optimizer):
            try:
                reference = weakref.ref(optimizer)
            except TypeError:  # __slots__ without __weakref__
                reference = None
            note = self._notes[id(optimizer)] = Note(reference)
        return note

    def all(self) -> list[Note]:
        """Every note."""
        return list(self._notes.values())

    def warn_once(self, optimizer: torch.optim.Optimizer, key: str, message: str) -> None:
        """FloatplanWarning at the user's line, unless this optimizer had the one of ``key`` before."""
        told = self.of(optimizer).told
        if key not in told:
            told.add(key)
            name = type(optimizer).__name__
            warnings.warn(f"{name}: {message}", FloatplanWarning, stacklevel=users_line())
