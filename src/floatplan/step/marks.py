"""Whether anybody but the Amp has touched the gradients that wait for their step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Marks = list[tuple[Tensor, int]]
"""Gradients, each with the number of times it had been written to."""


def marks_of(parameters: Iterable[Tensor]) -> Marks:
    """The gradients as they are now."""
    return [
        (grad, -1 if grad.is_inference() else grad._version)
        for parameter in parameters
        if (grad := parameter.grad) is not None
    ]


def same(one: Marks, other: Marks) -> bool:
    """Whether the gradients are the same tensors, and nothing was written to them in between."""
    return len(one) == len(other) and all(
        mine is theirs and version == before
        for (mine, version), (theirs, before) in zip(one, other, strict=True)
    )
