"""A call of a model, kept so that it can be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.engine.trees import tensors_in
from floatplan.watch.tensors import is_number_format


@dataclass
class Call:
    """A call of a model.

    Attributes:
        number: of the model.
        args: by reference.
        kwargs: by reference.
        versions: of the tensors among them, then.
        random: states of torch's generators before the call.
        gradients: that came into what it returned, by place; None while nobody looked.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    random: dict[str, Any]
    gradients: dict[int, Tensor] | None = None


def torch_random() -> dict[str, Any]:
    """States of torch's generators now."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def floating(result: Any) -> Iterator[Tensor]:
    """The tensors in a result that hold floating-point or complex numbers, in order."""
    return (tensor for tensor in tensors_in(result) if is_number_format(tensor.dtype))


def cloned(value: Any) -> Any:
    """A tree with its tensors copied: a forward may write to them."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied.requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: cloned(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cloned, value))
    return value


# --- Hooks ----------------------------------------------------------------------------------------------


class Following:
    """Hooks on models while a region is active: the models are as they were outside of it.

    Args:
        models: whose calls are followed.
        called: told the number of a model and its arguments, before it runs.
        returned: told the number of a model and what it returned.
    """

    def __init__(
        self,
        models: list[nn.Module],
        called: Callable[[int, tuple[Any, ...], dict[str, Any]], None],
        returned: Callable[[int, Any], None] | None,
    ) -> None:
        self._handles: list[Any] = []
        for number, model in enumerate(models):
            if model._compiled_call_impl is not None:
                continue  # of which hooks are part
            self._handles.append(model.register_forward_pre_hook(_before(called, number), with_kwargs=True))
            if returned is not None:
                self._handles.append(model.register_forward_hook(_after(returned, number)))

    def end(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _before(called: Callable[..., None], number: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():  # Dynamo leaves it out of what it compiles
            called(number, args, kwargs)

    return hook


def _after(returned: Callable[..., None], number: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if not torch.compiler.is_compiling():
            returned(number, result)

    return hook


class KeptGradient:
    """A hook of a tensor that keeps its gradient in a place."""

    def __init__(self, kept: dict[int, Tensor], place: int) -> None:
        self._kept, self._place = kept, place

    def __call__(self, gradient: Tensor) -> None:
        """The gradient is known."""
        self._kept[self._place] = gradient.detach()
