"""What was measured to choose a plan, and what was chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """One module that computes something itself.

    Attributes:
        module: qualified name; "" is the model.
        model: number of the model, from 0.
        precision: "fp32", "bf16" or "fp16".
        full: seconds of its own operators per micro-batch, forward and backward, in float32.
        low: the same in the low format, casts included.
    """

    module: str
    model: int
    precision: str
    full: float
    low: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a plan was chosen. Seconds are of one micro-batch's operators, forward and backward, as predicted.

    Attributes:
        low: the low format that was weighed against float32: "bf16" or "fp16".
        precision: of what no module contains, such as a loss beside the models.
        plans: text of the plan of each model.
        full: seconds, all in float32.
        all_low: seconds, all in the low format, as ``precision=low`` runs it.
        chosen: seconds as chosen.
        modules: those that compute something themselves, in the order of the model.
        measured: operator calls that were timed for it.
        found: those whose costs were known from an earlier time.
        left_out: operators that could not be timed and count nothing, and why.
        costs: where the costs are kept, or why they are not.
        channels_last: whether convolutions get this layout, with which ``chosen`` is predicted.
    """

    low: str
    precision: str
    plans: tuple[str, ...]
    full: float
    all_low: float
    chosen: float
    modules: tuple[ModuleChoice, ...]
    measured: int
    found: int
    left_out: dict[str, str]
    costs: str
    channels_last: bool = False

    @property
    def gain(self) -> float:
        """Predicted share of float32's time that is saved, in [0, 1); of operators, not of the whole step."""
        return 1 - self.chosen / self.full if self.full else 0.0

    @property
    def is_low_anywhere(self) -> bool:
        """Whether anything runs in the low format."""
        return self.precision != "fp32" or any(one.precision != "fp32" for one in self.modules)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gain": self.gain}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Choice:
        """What `as_dict` gave."""
        own = {name: value for name, value in values.items() if name != "gain"}
        modules = tuple(ModuleChoice(**one) for one in own.pop("modules"))
        return cls(**{**own, "plans": tuple(own["plans"]), "modules": modules})

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """What was chosen and why, in words."""
        if not self.modules:
            return ["Nothing was seen to run, so everything stays in float32."]
        mixed = {one.precision for one in self.modules}
        if not self.is_low_anywhere:
            lines = [
                f"Everything stays in float32: its operators alone take {_ms(self.full)} a micro-batch, and "
                f"{_ms(self.all_low)} in {self.low}."
            ]
        elif len(mixed) == 1 and self.precision != "fp32":
            lines = [
                f"Everything runs in {self.low}: operators take {_ms(self.chosen)} a micro-batch in place of "
                f"float32's {_ms(self.full)} ({self.gain:.0%} less)."
            ]
        else:
            wide = [one for one in self.modules if one.precision == "fp32"]
            narrow = [one for one in self.modules if one.precision != "fp32"]
            few, one, other = (
                (wide, "fp32", self.low) if len(wide) <= len(narrow) else (narrow, self.low, "fp32")
            )
            names = ", ".join(module.module or "the model itself" for module in few[:6])
            more = f" and {len(few) - 6} more" if len(few) > 6 else ""
            lines = [
                f"In {one}: {names}{more}; the rest in {other}. Operators take {_ms(self.chosen)} a "
                f"micro-batch in place of float32's {_ms(self.full)} and {self.low}'s {_ms(self.all_low)}."
            ]
        if self.channels_last:
            lines += [
                f"Convolutions run in channels_last, with which all takes {_ms(self.chosen)}.",
                "(A plan has no layout: beside one, write fp.Settings(channels_last=True).)",
            ]
        lines.append(f"{self.measured} operator calls were timed, {self.found} were known ({self.costs}).")
        if self.left_out:
            lines.append(f"Not timed, and not counted: {', '.join(sorted(self.left_out))}.")
        return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
