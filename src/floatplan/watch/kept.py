"""A call of a model, kept so that it can be made again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _torch
from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine.trees import tensors_in
from floatplan.watch.tensors import is_number_format


@dataclasses.dataclass
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


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Of the tensors among a call's arguments: a write to one moves it."""
    return [_torch.version_of(tensor) for tensor in tensors_in((args, kwargs))]


def torch_random() -> dict[str, Any]:
    """States of torch's generators now."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def floating(result: Any) -> Iterator[Tensor]:
    """The tensors in a result that hold floating-point or complex numbers, in order."""
    return (tensor for tensor in tensors_in(result) if is_number_format(tensor.dtype))


def cloned(value: Any) -> Any:
    """A tree with its tensors copied: a forward may write to them. Dataclasses are part of it, too."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied.requires_grad_(value.requires_grad)
    if isinstance(value, MutableMapping):
        tree: Any = copy.copy(value)
        for key, item in value.items():
            tree[key] = cloned(item)
        return tree
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cloned, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        other: Any = copy.copy(value)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(other, name, cloned(item))
        return other
    return value


def has_iterator(value: Any) -> bool:
    """Whether an argument is one that is used up when it is read, as a generator; at any depth."""
    if isinstance(value, dict | list | tuple):
        return any(map(has_iterator, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Iterator)


# --- Hooks ----------------------------------------------------------------------------------------------


class Following:
    """Keeps the last call of each model while a region is active: the models are as they were outside of it.

    What runs at each forward is written for speed: it runs in every step of every training.

    Args:
        models: whose calls are kept; compiled ones, of which hooks would be part, are not.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._last: dict[int, _Kept] = {}
        self._gradients: dict[int, dict[int, Tensor]] = {}
        self._random: dict[int, dict[str, Any]] = {}
        self._models = [
            (number, model) for number, model in enumerate(models) if model._compiled_call_impl is None
        ]
        self._hooks = [
            (*_torch.pre_hooks_of(model), _keeping(self._last, number, model))
            for number, model in self._models
        ]
        self._handles: list[Any] = []
        self._of_tensors: list[Any] = []

    def calls(self) -> list[Call]:
        """The last ones, in their order."""
        return [self.call(number) for number in self._last]

    def call(self, number: int) -> Call:
        """The last one of a model; KeyError if there was none."""
        args, kwargs, versions, random = self._last[number]
        random = self._random.get(number, random)
        return Call(number, args, kwargs, versions, random, self._gradients.get(number))

    def begin(self, with_gradients: bool) -> None:
        """A region is entered; the gradients of what calls return are kept, too, if wanted."""
        if self._of_tensors:
            self.backward_over()
        for hooks, with_kwargs, hook in self._hooks:
            hooks[hook] = hook
            with_kwargs[hook] = True
        if not with_gradients:
            if self._gradients or self._random:
                self._gradients.clear()
                self._random.clear()
        else:
            for number, model in self._models:
                before, after = self._with_all_random(number), self._with_gradients(number)
                self._handles.append(model.register_forward_pre_hook(before))
                self._handles.append(model.register_forward_hook(after))

    def end(self) -> None:
        """It is left."""
        for hooks, with_kwargs, hook in self._hooks:
            hooks.pop(hook, None)
            with_kwargs.pop(hook, None)
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def backward_over(self) -> None:
        """No gradients are waited for: what a call returned may be a weight, which stays."""
        for handle in self._of_tensors:
            handle.remove()
        self._of_tensors.clear()

    def _with_all_random(self, number: int) -> Callable[..., None]:
        kept = self._random

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                kept[number] = RandomStates().state_dict()

        return _Hook(hook)

    def _with_gradients(self, number: int) -> Callable[..., None]:
        kept = self._gradients

        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            kept[number] = {}
            for place, tensor in enumerate(floating(result)):
                if tensor.requires_grad:
                    keep = KeptGradient(kept[number], place)
                    self._of_tensors.append(tensor.register_hook(keep))  # type: ignore[no-untyped-call]

        return _Hook(hook)


_Kept = tuple[tuple[Any, ...], dict[str, Any], list[int], dict[str, Any]]
"""Arguments, keyword arguments, versions, random states."""


def _keeping(last: dict[int, _Kept], number: int, model: nn.Module) -> Callable[..., None]:
    parameter = next(model.parameters(), None)
    on_cpu = parameter is None or parameter.device.type == "cpu"
    has_gradients, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
    state, version = torch.default_generator.get_state, _torch.version_of

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or not has_gradients():
            return  # Dynamo leaves it out of what it compiles; an evaluation
        random = {"torch": state()} if on_cpu else torch_random()
        is_simple = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        versions = [version(args[0])] if is_simple else versions_of(args, kwargs)
        last.pop(number, None)
        last[number] = args, kwargs, versions, random

    return _Hook(hook)


class _Hook:
    """A hook of a model. A copy that is made of the model meanwhile has one that does nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None: ...


class KeptGradient:
    """A hook of a tensor that keeps its gradient in a place."""

    __torch_unserializable__ = True  # torch.save does not warn that a tensor has it

    def __init__(self, kept: dict[int, Tensor], place: int) -> None:
        self._kept, self._place = kept, place

    def __call__(self, gradient: Tensor | None) -> None:
        """The gradient is known; None of what nothing depends on, in a tuple with others."""
        if gradient is not None:
            self._kept[self._place] = gradient.detach()
