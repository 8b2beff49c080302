"""What modules keep besides buffers and gradients, and how it is put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _torch


class Attributes:
    """What modules keep besides parameters and buffers, as it is now: counters, lists, generators, tensors.

    Builtin containers are kept with what is in them; of objects of other classes it is kept which they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._kept = []
        for module in model.modules():
            held = module.__dict__
            # A TorchScript program has its attributes elsewhere; what torch keeps begins with an underscore.
            if not isinstance(module, torch.jit.ScriptModule):
                names = [name for name in held if name not in _OF_TORCH]
                self._kept.append((held, {name: held[name] for name in names}))
                for name in names:
                    self._keep(held[name])

    def _keep(self, value: Any) -> None:
        if id(value) in self._known or isinstance(value, nn.Parameter | nn.Module):
            return
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.requires_grad:
                self._known[id(value)] = value, value.clone()
        elif isinstance(value, torch.Generator):
            self._known[id(value)] = value, value.get_state()
        elif isinstance(value, random.Random):
            self._known[id(value)] = value, value.getstate()
        elif _is_numpy_generator(value):
            self._known[id(value)] = value, copy.deepcopy(value.bit_generator.state)
        elif isinstance(value, list | dict | set | deque):
            self._known[id(value)] = value, copy.copy(value)
            for item in value.values() if isinstance(value, dict) else value:
                self._keep(item)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item)

    def restore(self) -> None:
        """Put them back."""
        for held, before in self._kept:
            for name in [name for name in held if name not in before and name not in _OF_TORCH]:
                del held[name]
            held.update(before)
        for value, was in self._known.values():
            _put_back(value, was)


_OF_TORCH = frozenset(nn.Module().__dict__)


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape != before.shape or value.dtype is not before.dtype:
            value.data = before
        elif not torch.equal(_bits(value), _bits(before)):
            value.data.copy_(before)  # a graph that keeps it is not told: to it nothing has changed
    elif isinstance(value, torch.Generator):
        value.set_state(before)
    elif isinstance(value, random.Random):
        value.setstate(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    elif isinstance(value, deque):
        value.clear()
        value.extend(before)
    else:
        value.bit_generator.state = before


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Weights:
    """The parameters of a model as they are now: a forward may write to them, as embeddings with a largest
    norm do. Those that are spread over ranks, or are not dense, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (parameter, parameter.detach().clone())
            for parameter in model.parameters()
            if type(parameter.data) is Tensor
            and parameter.layout is torch.strided
            and not nn.parameter.is_lazy(parameter)
        ]
        self._acts = [
            (hooks, dict(hooks)) for parameter in model.parameters() if (hooks := _torch.acts_of(parameter))
        ]

    def silence(self) -> None:
        """Hooks that act when a gradient is there do not run until `restore`."""
        for hooks, _ in self._acts:
            hooks.clear()

    def restore(self) -> None:
        """Put them back."""
        for hooks, before in self._acts:
            hooks.update(before)
        for parameter, was in self._kept:
            _put_back(parameter, was)
