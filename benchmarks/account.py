"""Which tensors are alive in a step, by what they are for: every storage once, from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from floatplan._torch import Watch

KINDS = ("weights", "copies", "gradients", "state", "saved", "rest")
"""Parameters and buffers; low-precision copies of them; gradients of parameters; what the optimizer keeps;
what else autograd saved for the backward; whatever is left: values on their way."""


class Account:
    """Bytes of tensors that operators make while it watches, and of those of a model.

    What an operator uses inside of itself is not seen.

    Args:
        model: its parameters and buffers are "weights".
        optimizer: over its parameters.
        known: tensors that are no method's doing, such as batches; not counted.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, known: Iterable[Tensor] = ()
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._known = {_key(tensor) for tensor in known}
        self._live: dict[int, int] = {}
        self._copies: set[int] = set()
        self._saved: set[int] = set()
        self._weights: set[int] = set()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(tensor)
            self._weights.add(_key(tensor))

    def begin(self) -> None:
        """From now on the peak is another one."""
        self.peak, self.at_peak = 0, {}
        self._look()

    def run(self, step: Callable[[], Any]) -> None:
        """Take a step under observation; it computes what it would without."""
        with Watch(self._tell), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            step()

    def _tell(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if op in CASTS and made:
            source = args[0] if op is torch.ops.aten._to_copy.default else args[1]
            is_lower = isinstance(source, Tensor) and made[0].dtype.itemsize < source.dtype.itemsize
            if is_lower and _key(source) in self._weights:
                self._copies.add(_key(made[0]))
        for tensor in made:
            self._add(tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        self._saved.add(_key(tensor))
        return tensor.detach()  # an output that its own node held would live for ever

    def _add(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if not key or key in self._live or key in self._known:
            return
        storage = tensor.untyped_storage()
        self._live[key] = storage.nbytes()
        self.total += storage.nbytes()
        weakref.finalize(storage, self._died, key).atexit = False
        if self.total > self.peak:
            self._look()

    def _died(self, key: int) -> None:
        self.total -= self._live.pop(key, 0)
        for kind in (self._copies, self._saved):
            kind.discard(key)

    def _look(self) -> None:
        self.peak = self.total
        state = [value for of in self._optimizer.state.values() for value in tree_leaves(of)]
        gradients = [weight.grad for weight in self._model.parameters() if weight.grad is not None]
        sets = {
            "weights": self._weights,
            "gradients": set(map(_key, gradients)),
            "state": {_key(value) for value in state if isinstance(value, Tensor)},
            "copies": self._copies,
            "saved": self._saved,
        }
        found = dict.fromkeys(KINDS, 0)
        for key, size in self._live.items():
            found[next((kind for kind, keys in sets.items() if key in keys), "rest")] += size
        self.at_peak = found


CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


def _key(tensor: Tensor) -> int:
    """Of the storage; 0 where there is none, as of a sparse tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
