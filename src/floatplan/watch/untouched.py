"""What a step writes to, and how it is put back."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _torch
from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine import cache


_looking = threading.local()


def is_looking() -> bool:
    """Whether what this thread runs is a step that is only looked at: see `untouched`."""
    return getattr(_looking, "depth", 0) > 0


class Buffers:
    """The buffers of a model as they are now: which tensors, and what they hold.

    A forward may write to one, or put another in its place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (held, name, buffer, None if buffer is None else buffer.clone())
            for held in map(_torch.buffers_of, model.modules())
            for name, buffer in held.items()
        ]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for held, name, buffer, before in self._kept:
                if buffer is not None and before is not None:
                    buffer.copy_(before)
                if held.get(name) is not buffer:
                    held[name] = buffer


class _Attributes:
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
        for value, before in self._known.values():
            _put_back(value, before)


_OF_TORCH = frozenset(nn.Module().__dict__)


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        if not _is_same(value, before):
            value.data.copy_(before)  # of which no graph is told that keeps it, and there is nothing to tell
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


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Weights:
    """The parameters of a model as they are now: a forward may write to them, as embeddings with a largest
    norm do. Those that are spread over ranks, or are not dense, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (parameter, parameter.detach().clone())
            for parameter in model.parameters()
            if type(parameter.data) is Tensor
            and parameter.layout is torch.strided
            and not isinstance(parameter, nn.parameter.UninitializedTensorMixin)
        ]
        self._acts = [
            (hooks, dict(hooks)) for parameter in model.parameters() if (hooks := _torch.acts_of(parameter))
        ]
        for hooks, _ in self._acts:
            hooks.clear()

    def restore(self) -> None:
        """Put them back."""
        for hooks, before in self._acts:
            hooks.update(before)
        for parameter, before in self._kept:
            _put_back(parameter, before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """All that a step of ``model`` writes to is put back; of other gradients see `gradients_aside`.

    That is: parameters, gradients, buffers, what modules keep besides, and random states. Hooks that act when
    a gradient is there, as an optimizer in the backward, do not run. Meanwhile the model has copies of its buffers: a backward that waits for its turn may have kept them
    as they are, and would find them changed. (Those of TorchScript, which cannot be replaced, are written
    back.) Torch's anomaly mode, which raises at the first NaN, is off.
    """
    attributes, weights = _Attributes(model), _Weights(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(held, dict(held)) for held in map(_torch.buffers_of, model.modules())]
    generators = RandomStates()
    states = generators.state_dict()
    copies: dict[int, Tensor] = {}
    scripted = [
        (buffer, buffer.clone())
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for buffer in module.buffers(recurse=False)
    ]
    _looking.depth = getattr(_looking, "depth", 0) + 1
    try:
        for held, before in buffers:
            for name, buffer in before.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    held[name] = copies[id(buffer)]
        with cache.set_aside(), torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        _looking.depth -= 1
        generators.load_state_dict(states)
        attributes.restore()
        weights.restore()
        for held, before in buffers:
            held.clear()
            held.update(before)
        with torch.no_grad():
            for buffer, was in scripted:
                buffer.copy_(was)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def gradients_aside(loss: Tensor, model: nn.Module) -> Iterator[None]:
    """Leaves that ``loss`` was computed from, but for parameters of ``model``, have their gradients after it.

    As those of another model, or of inputs: a backward would add to them.
    """
    own = {id(parameter) for parameter in model.parameters()}
    kept = [(leaf, leaf.grad) for leaf in _leaves(loss) if id(leaf) not in own]
    try:
        for leaf, _ in kept:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)
