"""Whose forward is running: the modules of a model, followed by hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Modules:
    """The modules whose forwards this thread is in, outermost first.

    Hooks on all modules, not on those of the model: the model is not touched, and modules that are not
    registered in it are seen, too.

    Attributes:
        on_entry: called with the name and the positional arguments of a module that no other runs around.
    """

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        self._names = {number: " = ".join(found) for number, found in names.items()}
        self._model = model
        self._running: list[nn.Module] = []
        self.on_entry: Callable[[str, Any], None] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Forwards of this thread are followed in this context."""
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._running.append(module)
                if self.on_entry is not None and len(self._running) == 1:
                    self.on_entry(self.current_name, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread and module in self._running:
                while self._running.pop() is not module:
                    pass  # left by an exception that the model caught

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

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
