"""What a step of an optimizer may write to, kept to be put back in place."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class Snapshot:
    """Parameters, state and ``param_groups`` of an optimizer as they are now, to go back to.

    Dicts, lists, deques, sets and tensors stay the very objects that they are: whoever holds
    ``optimizer.param_groups[0]`` or a tensor of the state holds the live one afterwards, in its own dtype.
    What an optimizer keeps in other objects, or as attributes of its own, is not known here.

    Args:
        optimizer: has ``param_groups``, and ``state`` or not.
        parameters: whether the parameters are copied, too.
        device: where the copies lie; None for where the tensors lie.
    """

    def __init__(self, optimizer: Any, *, parameters: bool = True, device: str | None = None) -> None:
        self._optimizer, self._device = optimizer, device
        self._seen: set[int] = set()
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not parameters:
            self._seen.update(map(id, params))
        for param in params:
            self._keep(param, True)
        self._attributes = {
            name: getattr(optimizer, name) for name in ("param_groups", "state") if hasattr(optimizer, name)
        }
        # LBFGS keeps a long history of tensors in lists, to which it adds and never writes.
        writes_in_lists = not isinstance(optimizer, torch.optim.LBFGS)
        for value in self._attributes.values():
            self._keep(value, writes_in_lists)

    def _keep(self, value: Any, in_lists: bool) -> None:
        """Copy the tensors in ``value``, each once; of what holds them, which ones it holds."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._tensors.append((value, self._copied(value)))
        elif isinstance(value, (dict, list, deque, set, tuple)) and id(value) not in self._seen:
            self._seen.add(id(value))
            # A tuple is held as well: what was seen must stay alive, or another object gets its id.
            self._containers.append((value, dict(value) if isinstance(value, dict) else list(value)))
            for inner in value.values() if isinstance(value, dict) else value:
                if not isinstance(inner, torch.Tensor) or in_lists or not isinstance(value, list):
                    self._keep(inner, in_lists)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.clone() if self._device is None else tensor.to(self._device, copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was, however often."""
        for tensor, before in self._tensors:
            if tensor.shape == before.shape and tensor.dtype == before.dtype:
                tensor.copy_(before)
            else:  # given other memory by its optimizer
                tensor.data = before.to(tensor.device, copy=True)
        for value, before in self._containers:
            if isinstance(value, list):
                value[:] = before
            elif not isinstance(value, tuple):
                value.clear()
                value.extend(before) if isinstance(value, deque) else value.update(before)
        for name, kept in self._attributes.items():
            if getattr(self._optimizer, name) is not kept and name in getattr(
                self._optimizer, "__dict__", ()
            ):
                setattr(self._optimizer, name, kept)
