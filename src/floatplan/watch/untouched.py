"""What a step writes to, and how it is put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from floatplan import _torch
from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine import cache
from floatplan.watch.attributes import Attributes, Weights

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


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """All that a step of ``model`` writes to is put back; of other gradients see `gradients_aside`.

    That is: parameters, gradients, buffers, what modules keep besides, and random states. Hooks that act when
    a gradient is there, as those of an optimizer that steps in the backward, do not run.

    Meanwhile the model has copies of its buffers: a backward that waits for its turn may have kept them
    as they are, and would find them changed. (Those of TorchScript, which cannot be replaced, are written
    back.) Torch's anomaly mode, which raises at the first NaN, is off.
    """
    attributes, weights = Attributes(model), Weights(model)
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
        weights.silence()
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
