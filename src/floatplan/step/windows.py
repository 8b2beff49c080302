"""The windows of an Amp: one for each set of optimizers that steps together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.errors import StepError
from floatplan.scaling import GradScaler
from floatplan.step import checks, saved
from floatplan.step.names import Names
from floatplan.step.precision import Precision
from floatplan.step.window import Window

Key = tuple[int, ...]
"""Places of the optimizers in the Amp."""


class Windows:
    """Makes and finds windows. No two that share an optimizer have gradients at the same time.

    Args:
        models: hold the parameters.
        optimizers: all of them.
        precision: makes the scaler of a new window.
        drops: see `Window`.
        group: the process group whose ranks step together, or None.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision,
        drops: bool,
        group: Any,
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._precision, self._drops, self._group = precision, drops, group
        self._all: Key = tuple(range(len(optimizers)))
        self._names = Names(models)
        self._sizes = self._count()
        self._windows: dict[Key, Window] = {}
        self._others: dict[Key, list[Tensor]] = {}

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows.values())

    def of(self, optimizer: torch.optim.Optimizer | None, must_be_alone: bool = True) -> Window:
        """The window of one optimizer, or that of all.

        Args:
            optimizer: steps alone; None: all step together.
            must_be_alone: no other window that shares an optimizer with it may have gradients.

        Raises:
            StepError: one has, or the optimizer is not of this Amp.
        """
        key = self._all
        if optimizer is not None:
            key = tuple(place for place, known in enumerate(self._optimizers) if known is optimizer)
            if not key:
                raise StepError(
                    "this optimizer is none of those that the Amp was made with; pass it to Amp(...)"
                )
        for other_key, other in self._windows.items():
            if other_key == key or not must_be_alone:
                continue
            if not other.is_fresh and set(other_key) & set(key):
                raise StepError(
                    "gradients of another window, that shares an optimizer with this one, wait for their "
                    "step; call step() or flush() with the same optimizer argument as their backward first"
                )
        self._check_sizes()
        window = self._windows.get(key)
        if window is None:
            if self._precision.own_scaler is not None and self._windows:
                raise StepError(
                    "a scaler of your own serves optimizers that always step together; leave out scaler=, "
                    "and each optimizer that steps alone has one, or make an Amp for each"
                )
            window = self._windows[key] = self._make(key)
        return window

    def _make(self, key: Key) -> Window:
        chosen = [self._optimizers[place] for place in key]
        reduce = None if self._group is None else self._reduce
        return Window(chosen, self._names, self._precision.make_scaler(), self._drops, reduce)

    def _reduce(self, flags: Tensor) -> None:
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self._group)

    def _count(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _check_sizes(self) -> None:
        """Look at the parameters again if an optimizer was given more."""
        sizes = self._count()
        if sizes != self._sizes:
            checks.check_parameters(self._models, self._optimizers)
            self._sizes, self._others = sizes, {}

    def place_of(self, window: Window) -> int | None:
        """Place of the optimizer that steps alone in ``window``; None where all or several do."""
        key = next(key for key, known in self._windows.items() if known is window)
        return key[0] if len(key) == 1 and len(self._all) > 1 else None

    def in_turn(self) -> int:
        """How many windows there are, each with steps of its own."""
        return len(self._windows)

    def others(self, window: Window) -> list[Tensor]:
        """Parameters of the other optimizers, whose gradients a backward for this window leaves alone."""
        key = next(key for key, known in self._windows.items() if known is window)
        if key not in self._others:
            mine = {id(parameter) for parameter in window.parameters()}
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            self._others[key] = [p for group in groups for p in group["params"] if id(p) not in mine]
        return self._others[key]

    def others_gradients(self, window: Window) -> list[tuple[Tensor, Tensor | None]]:
        """Those parameters, each with its gradient, which a backward for ``window`` writes over."""
        if len(window.optimizers) == len(self._optimizers):
            return []
        before = [(other, other.grad) for other in self.others(window) if other.requires_grad]
        # A view may be of memory that this backward writes to.
        return [(p, g.clone() if g is not None and g._is_view() else g) for p, g in before]

    def nothing_waits(self) -> bool:
        """Whether no window has gradients."""
        return all(window.is_fresh for window in self)

    def others_wait(self, window: Window) -> bool:
        """Whether any but ``window`` has gradients."""
        return any(not other.is_fresh for other in self if other is not window)

    def others_open(self, window: Window) -> bool:
        """Whether a micro-batch of any but ``window`` is."""
        return any(other.is_open for other in self if other is not window)

    def remark(self, window: Window) -> None:
        """Gradients of the others were put back by the Amp itself."""
        for other in self:
            if other is not window:
                other.remark()

    def clear(self) -> None:
        """Take the gradients of all windows away: they are scaled, and nobody is left to step with them."""
        for window in self:
            if not window.is_fresh:
                window.clear()

    def wait_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients of ``optimizer`` are in a window."""
        return any(
            not window.is_fresh and any(one is optimizer for one in window.optimizers) for window in self
        )

    def scaler(self) -> GradScaler:
        """Of some window; a disabled one where the loss is not scaled."""
        known = next((window.scaler for window in self), None)
        return known or self._precision.make_scaler() or GradScaler("cpu", enabled=False)

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of each window, by the places of its optimizers."""
        return {",".join(map(str, key)): window.state_dict() for key, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any], before: Callable[[], None]) -> None:
        """Take over the windows of an Amp's state, and have no others.

        Args:
            state: of an Amp.
            before: called when all is checked and nothing changed.

        Raises:
            StepError: it does not fit. Nothing has changed then.
        """
        found = saved.windows_of(state, len(self._optimizers))
        windows = {key: self._windows.get(key) or self._make(key) for key in found}
        for key, of_window in found.items():
            saved.check_window(of_window, windows[key])
        before()
        for window in (*self, *windows.values()):
            window.clear()
        self._windows = windows
        for key, of_window in found.items():
            windows[key].load_state_dict(of_window)
