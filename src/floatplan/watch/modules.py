"""Whose forward is running: the modules of a model, followed by hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from floatplan import _torch


class Modules:
    """The modules whose forwards this thread is in, outermost first.

    Hooks on all modules, not on those of the model: the model is not touched, and modules that are not
    registered in it are seen, too.

    Attributes:
        on_entry: called with the name and the positional arguments of a module that no other runs around.
        on_exit: called with the name and the keyword arguments of such a module when it has run.
    """

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        self._names = {number: " = ".join(found) for number, found in names.items()}
        self._model = model
        self._running: list[nn.Module] = []
        self.on_entry: Callable[[str, Any], None] | None = None
        self.on_exit: Callable[[str, Any], None] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Forwards of this thread are followed in this context."""
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._running.append(module)
                if self.on_entry is not None and len(self._running) == 1:
                    self.on_entry(self._called(module), args)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if threading.get_ident() != thread or module not in self._running:
                return
            while self._running.pop() is not module:
                pass  # left by an exception that the model caught
            # After an exception torch (2.13) leaves the keyword arguments out.
            if self.on_exit is not None and not self._running and len(rest) == 2:
                self.on_exit(self._called(module), rest[0])

        entering = register_module_forward_pre_hook(enter)  # torch tells it of no keyword arguments
        leaving = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            _torch.remove_forward_hook(leaving)
            self._running.clear()

    def _called(self, module: nn.Module) -> str:
        """A name for a reader; the class of one that is not in the model, as a criterion."""
        if module is self._model:
            return "the model"
        return self._names.get(id(module)) or type_name(module)

    @property
    def is_inside(self) -> bool:
        """Whether any forward runs."""
        return bool(self._running)

    @property
    def current(self) -> nn.Module:
        """The innermost one; the model where none runs."""
        return self._running[-1] if self._running else self._model

    @property
    def current_name(self) -> str:
        """Its qualified name; one that is not registered in the model has that of what runs around it."""
        for module in reversed(self._running):
            if id(module) in self._names:
                return self._names[id(module)]
        return ""

    def around(self) -> Iterator[nn.Module]:
        """From the innermost outwards."""
        return reversed(self._running)


def type_name(module: nn.Module) -> str:
    """The class of a module, as its author called it."""
    return type(module).__name__
