"""A device whose tensors no one can look at: a stand-in for an accelerator, that computes on the CPU.

A `Far` tensor says that it lies on "meta", which autograd serves in the calling thread, as the CPU. Its
values are those of a CPU tensor inside. Whatever would make the host wait for a real device (``item``,
``bool``, ``tolist``, a copy to the CPU) raises `Sync`, unless `waiting_is_fine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
FAR = torch.device("meta")
_waits: list[list[Any]] = []


class Sync(Exception):
    """The host would wait for the device."""


@contextmanager
def waiting_is_fine() -> Iterator[list[Any]]:
    """Looking at values is allowed; what did so is put into the list."""
    _waits.append([])
    try:
        yield _waits[-1]
    finally:
        _waits.pop()


class Far(torch.Tensor):
    """A tensor on the far device, made of one on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Far:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=FAR,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FarDevice(TorchDispatchMode):
    """While it is on, what is made on the far device is made of `Far` tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def near(value: Any) -> Any:
    """The CPU tensor inside."""
    if isinstance(value, Far):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == FAR.type else value


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == FAR.type


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Far)]
    device = kwargs.get("device")
    leaves = func is aten._local_scalar_dense.default or (
        device is not None and torch.device(device).type == "cpu"
    )
    if given and leaves:
        if not _waits:
            raise Sync(f"{func} looks at a tensor on the far device")
        _waits[-1].append(func)
    out = func(*tree_map(near, args), **tree_map(near, kwargs))
    if leaves or not (given or _is_far(device)):
        return out
    mine = {id(one.inner): one for one in given}

    def far(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = mine.get(id(value))  # what works in place returns its argument
        return Far(value) if known is None else known

    return tree_map(far, out)
