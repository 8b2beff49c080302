"""Where the first value that is not finite was born, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Where = Literal["", "input", "weight", "forward", "loss", "backward"]
"""Where a value was born: in the batch, in a parameter, buffer or optimizer state, in the forward of a
module, in what is computed outside of all modules, or in the backward of either. "" without a fault."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one step showed.

    Attributes:
        is_healthy: loss and gradients are finite, and not all zero.
        module: qualified name of the module; "" is the model itself, or nothing in it.
        op: the operator, such as ``aten::linear``; "" where it is none.
        where: see `Where`.
        cause: what happened, in one sentence.
        fix: what to write, in a line or two.
        chain: names of modules that the value passed through, in order.
        precision: of the step: "bf16", "fp16", "fp32", or "plan".
        fine_in_float32: whether the same step in float32 has finite loss and gradients; None if it was not
            run or could not.
        scale: by which the loss was multiplied.
        loss: its value, unscaled; None where there was none.
        notes: what was not judged in the format that was asked for, and how it would be.
    """

    is_healthy: bool
    module: str = ""
    op: str = ""
    where: Where = ""
    cause: str = ""
    fix: str = ""
    chain: tuple[str, ...] = ()
    precision: str = ""
    fine_in_float32: bool | None = None
    scale: float = 1.0
    loss: float | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Diagnosis:
        """What `as_dict` gave, also with lists in place of tuples.

        Raises:
            TypeError: fields that a diagnosis does not have.
        """
        return cls(**{**values, "chain": tuple(values["chain"]), "notes": tuple(values["notes"])})

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """The finding, the way of the value, float32's verdict, and what to do: a line each."""
        if self.is_healthy:
            healthy = f"Nothing is wrong with this step in {self.precision}: loss and gradients are finite."
            return [healthy, *self.notes]
        places = {
            "input": "In the batch",
            "weight": f"In the state of {self.module or 'the model'}",
            "forward": f"In the forward of {self.module or 'the model itself'}",
            "loss": "Outside of the modules, on the way to the loss",
            "backward": f"In the backward of {self.module or 'what is outside of the modules'}",
        }
        lines = [f"{places[self.where]}{f', {self.op}' if self.op else ''}: {self.cause}."]
        if self.chain:
            shown = " -> ".join(name or "the model" for name in self.chain[:8])
            more = f" and {len(self.chain) - 8} more" if len(self.chain) > 8 else ""
            lines.append(f"From there it went through {shown}{more}.")
        if self.fine_in_float32 is not None and self.precision != "fp32":
            verdict = "is fine" if self.fine_in_float32 else "fails, too: it is not the precision"
            lines.append(f"The same step in float32 {verdict}.")
        return [*lines, f"What to do: {self.fix}", *self.notes]
