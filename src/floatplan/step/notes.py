"""Words that an error or a warning of a training step carries besides what went wrong."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from floatplan.errors import FloatplanWarning, users_line

ACCUMULATING = "accumulating"
NO_GRADIENTS = "no parameter of the optimizer has a gradient, so there is nothing to step with"
WHY_NONE = "does the loss reach its parameters, and is it the optimizer that was meant?"

OUTSIDE = (
    "no amp.autocast() was entered before this loss: if its forward was to run in the precision of the Amp, "
    "it did not, and a step that is skipped cannot put running statistics back. Write: with "
    "amp.autocast(): loss = ..."
)

CALLED_BEFORE = (
    "this loss had its backward already: step(loss) and backward(loss) of an Amp call loss.backward() "
    "themselves, once. Leave loss.backward() out; after amp.backward(loss) call amp.step() without the loss; "
    "for several losses of one graph pass retain_graph=True to amp.backward. The gradients are cleared, no "
    "weight has changed"
)


def some(names: Sequence[str], count: int = 3) -> str:
    """The first few names, and how many there are besides."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def warn(message: str) -> None:
    """A FloatplanWarning at the user's line."""
    warnings.warn(message, FloatplanWarning, stacklevel=users_line())


def add(error: BaseException, note: str) -> None:
    """Add a note to an error of somebody else's code (Python 3.11 and later show it)."""
    if hasattr(error, "add_note"):
        error.add_note(f"floatplan: {note}")


def was_called_before(error: BaseException) -> bool:
    """Whether a backward failed because the graph was gone."""
    return isinstance(error, RuntimeError) and "second time" in str(error)


def of_backward(lost: int) -> str:
    """What became of the gradients when a backward failed, and those of ``lost`` micro-batches with it."""
    words = f"the gradients of {lost} micro-batches before it are cleared, too. " if lost else ""
    return f"backward failed, and its gradients are cleared. {words}No weight has changed"
