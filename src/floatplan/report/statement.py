"""One thing that is said of a training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Level: TypeAlias = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that is said.

    Attributes:
        level: "bad" where the training went wrong or loses something that it should not, "note" for what to
            know before a change, "good" for the rest.
        topic: "findings", "precision", "loss", "scale", "overflow", "underflow" or "updates".
        short: in a few words, for the headline; "" where it is good.
        text: in sentences.
        bf16: names of the modules that fp16 is too narrow for and bf16 is not.
    """

    level: Level
    topic: str
    short: str
    text: str
    bf16: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def listed(parts: list[str], most: int = 6) -> str:
    """``a``, ``a and b``, ``a, b and c``, ``a, b, ... and 9 more``."""
    if len(parts) > most:
        parts = [*parts[: most - 1], f"{len(parts) - most + 1:,} more"]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
