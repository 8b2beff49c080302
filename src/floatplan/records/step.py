"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from floatplan.records.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one optimizer step did, in plain Python numbers. The fields are those of ``StepResult``."""

    stepped: bool
    found_inf: bool
    reason: str
    scale: float
    grad_norm: float | None = None
    culprit: str | None = None
    skips_in_a_row: int = 0


class StepEvidence(Protocol):
    """What a ``StepResult`` reads from: it may hold tensors, and turns them into numbers when asked."""

    @property
    def value(self) -> Any:
        """What the optimizer's ``step`` returned; None if it was not called."""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Why it was refused, if that was looked for; known when the facts are."""

    def facts(self) -> StepFacts:
        """The facts of the step; the same answer each time."""

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None before it."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    """Evidence that is numbers already: of a disabled scaler, or of a result that was copied or pickled."""

    known: StepFacts
    scale_after: float | None = None
    value: Any = None
    diagnosis: Diagnosis | None = None

    def facts(self) -> StepFacts:
        """The facts of the step."""
        return self.known

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None where it had not run when this was made."""
        return self.scale_after


class StepResult:
    """What one call of ``step`` did: true when the optimizer stepped, and in words why it did not.

    It may be kept and read at any time later, and always gives the answer of its own step. On an
    accelerator the first field that is read waits for the device; making the result does not.
    ``repr``, ``copy`` and ``pickle`` read every field.
    """

    __slots__ = ("__weakref__", "_evidence")
    _evidence: StepEvidence

    def __init__(self, evidence: StepEvidence) -> None:
        object.__setattr__(self, "_evidence", evidence)

    @property
    def stepped(self) -> bool:
        """Whether the weights were updated."""
        return self._evidence.facts().stepped

    @property
    def found_inf(self) -> bool:
        """Whether something not finite was found, so that the step was refused."""
        return self._evidence.facts().found_inf

    @property
    def reason(self) -> str:
        """Why it stepped or did not, in words."""
        return self._evidence.facts().reason

    @property
    def scale(self) -> float:
        """The scale that this step's gradients were divided by (1.0 where scaling is disabled)."""
        return self._evidence.facts().scale

    @property
    def next_scale(self) -> float | None:
        """The scale after the ``update()`` that followed this step; None before it."""
        return self._evidence.next_scale()

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over all unscaled gradients of the optimizer, before clipping.

        Not finite where a gradient is not.

        None where nothing was measured: scaling disabled, no gradients, or an optimizer or a subclass
        of the scaler that unscales by itself.
        """
        return self._evidence.facts().grad_norm

    @property
    def culprit(self) -> str | None:
        """The last parameter, in the optimizer's order, whose gradient was refused; None if there is none.

        In a model whose parameters stand in forward order it is the first that the backward pass spoiled.
        A name if the optimizer was given named parameters, else the place in ``param_groups`` and the shape.
        """
        return self._evidence.facts().culprit

    @property
    def skips_in_a_row(self) -> int:
        """How many steps of this optimizer in a row were skipped, this one included; 0 when it stepped."""
        return self._evidence.facts().skips_in_a_row

    @property
    def value(self) -> Any:
        """What the optimizer's ``step`` returned; None when it was not called."""
        return self._evidence.value

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Why the step was refused, where an `Amp` looked for it: see ``Settings(diagnose=...)``."""
        self._evidence.facts()
        return self._evidence.diagnosis

    def __bool__(self) -> bool:
        return self.stepped

    def __repr__(self) -> str:
        names = (
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
        found = () if self.diagnosis is None else ("diagnosis",)
        return "StepResult(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in (*names, *found)) + ")"

    def __reduce__(self) -> tuple[type[StepResult], tuple[KnownStep]]:
        return StepResult, (KnownStep(self._evidence.facts(), self.next_scale, self.value, self.diagnosis),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"StepResult cannot be changed: {name} tells of a step that is over")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"StepResult cannot be changed: {name} cannot be deleted")
