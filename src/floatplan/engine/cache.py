"""The cast cache of a region: a tensor that several operators take is cast once.

The first use casts as autograd does. Each further use in the region shares the low-precision values of the
first and gets an edge of its own between source and values, whose backward returns the gradient in the
source's dtype, so that the gradients of several uses add up in float32.

The copy of an activation goes when a norm, or whatever is `inner`, is met. The copy of a large weight is kept
past the region: its memory is used again in the next, if nobody else still holds it. (Fresh memory of several
megabytes costs page faults, as much again as the cast; less comes back from the allocator still warm, and
casting into memory of our own was measured slower.) A backward frees it: at its end, when all gradients are
there, most memory is in use, and copies of the weights beside them would raise the peak.

A copy is fresh when it was made after the innermost region was entered and after the last step of any torch
optimizer, and neither the source's version nor its memory has moved since. It must not live longer:
``_version`` does not move when a fused optimizer steps or somebody writes through ``.data`` or NumPy.

Each thread has copies of its own. Sources are held by weak references only.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from floatplan import _torch
from floatplan.engine import ledger

Key = tuple[int, torch.dtype, Any]

_SHORT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float32: Tensor.float,
}


def convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, told to who counts casts."""
    if ledger.listeners:
        ledger.tell(tensor, dtype)
    return _converted(tensor, dtype)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)`` without the time it takes to find out what kind of argument it got."""
    return _SHORT[dtype](tensor) if dtype in _SHORT else tensor.to(dtype)


SHARE_FROM = 2**14
"""Elements from which on a tensor is cast once. Smaller ones are cast for each use: that costs less than to
look for an earlier copy and to put an edge to it (two uses: 0.74 of it for 64 elements, 0.82 for 16,384)."""

KEEP_FROM = 2**21
"""Elements (4 MiB of copy) from which on the memory of a weight's copy is kept for the next region."""

MOST_ACTIVATIONS = 32
"""Copies of activations that are held at a time."""

_EXACT_TYPES = frozenset({Tensor, torch.nn.Parameter})
_tick = itertools.count(1).__next__


class _Edge(torch.autograd.Function):
    """From a source to its copy. Autograd returns the gradient in the source's dtype by itself."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, copy: Tensor, kept: _Entry | None) -> Tensor:
        ctx.kept = kept
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        kept, ctx.kept = ctx.kept, None
        free(kept)
        return gradient, None, None


class _Entry(weakref.ref[Tensor]):
    """One copy, and what its source was when the copy was made.

    A reference to the source (or the weight that it is a part of); when that dies, the copy goes, too.

    Attributes:
        copies: those of the thread.
        key: its place among them.
        copy: the low-precision values. Of a large weight without a graph, in memory of its own; otherwise
            what the first use got.
        layout: shape, strides and device of the source, if the memory of the copy is kept past the region.
        version: of the source.
        pointer: where the memory of the source begins.
        stamp: when the copy was made.
    """

    __slots__ = ("copies", "copy", "key", "layout", "pointer", "stamp", "version")
    copies: _Copies
    key: Key
    copy: Tensor
    layout: tuple[Any, ...] | None
    version: int
    pointer: int
    stamp: int


def _drop(entry: Any) -> None:
    entries = entry.copies.entries
    if entries.get(entry.key) is entry:  # the key may belong to another source by now
        del entries[entry.key]


def _layout(source: Tensor) -> tuple[Any, ...]:
    return source.shape, source.stride(), source.device


class _Copies:
    """The copies of one thread.

    Attributes:
        activations: keys of copies of what is no weight.
        since: when the innermost region was entered; ``None`` where nothing is to be cached.
        depth: how many regions the thread is in.
        keeps: whether copies of large weights outlive their backward.
    """

    __slots__ = ("__weakref__", "activations", "depth", "entries", "keeps", "since")

    def __init__(self) -> None:
        self.entries: dict[Key, _Entry] = {}
        self.activations: list[Key] = []
        self.since: int | None = None
        self.depth = 0
        self.keeps = False


class _Local(threading.local):
    def __init__(self) -> None:
        self.copies = _Copies()
        with _lock:
            _all_copies.add(self.copies)


_lock = threading.Lock()
_all_copies: weakref.WeakSet[_Copies] = weakref.WeakSet()
_local = _Local()
_last_step = 0
_watching_steps = False


def watch_optimizers() -> None:
    """From now on no copy outlives the step of a torch optimizer. Once in a process."""
    global _watching_steps
    with _lock:
        if not _watching_steps:
            register_optimizer_step_post_hook(_after_step)
            _watching_steps = True


def _after_step(*_: Any) -> None:
    global _last_step
    _last_step = _tick()


def enter(caching: bool) -> int | None:
    """A region begins in this thread; what it returns goes to `leave`."""
    copies = _local.copies
    before = copies.since
    copies.depth += 1
    copies.since = _tick() if caching else None
    return before


def leave(before: int | None) -> None:
    """The region ends. Where none around it can use its copies only those of large weights stay."""
    copies = _local.copies
    copies.depth -= 1
    since, copies.since = copies.since, before if copies.depth else None
    if copies.since is None:
        copies.activations.clear()
    if copies.since is None and copies.entries:
        after = since if copies.depth and since is not None else 0
        copies.entries = {
            key: entry for key, entry in copies.entries.items() if entry.layout or entry.stamp < after
        }


@contextmanager
def set_aside() -> Iterator[None]:
    """In this context the thread has no copies but those that it makes there, which go at its end."""
    mine = _local.copies
    _local.copies = _Copies()
    _local.copies.since, _local.copies.depth = mine.since, mine.depth
    try:
        yield
    finally:
        _local.copies = mine


def cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    """``source`` (float32, dense) in ``dtype``, cast at most once per region unless it is small."""
    if _torch.is_traced() or source.numel() < SHARE_FROM:
        return convert(source, dtype)
    return cast_plainly(source, dtype)


def cast_plainly(source: Tensor, dtype: torch.dtype) -> Tensor:
    """`cast`, of a tensor that is not small, in a call that is not `floatplan._torch.is_traced`."""
    copies = _local.copies
    since = copies.since
    if (
        since is None
        or type(source) not in _EXACT_TYPES
        or source.is_inference()
        or torch.autograd.forward_ad._current_level >= 0
        or (source.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return convert(source, dtype)
    owner, part = source, None
    if source._is_view() and (base := source._base) is not None and _is_weight(base):
        owner, part = base, (source.storage_offset(), source.shape, source.stride())
    key = (id(owner), dtype, part)
    entries = copies.entries
    entry = entries.get(key)
    if entry is not None and entry() is owner:
        if (
            entry.stamp > since
            and entry.stamp > _last_step
            and entry.version == source._version
            and entry.pointer == source.data_ptr()
        ):
            return _share(source, entry)
        if entry.layout and entry.layout == _layout(source) and _torch.storage_is_ours(entry.copy):
            if ledger.listeners:
                ledger.tell(source, dtype)
            entry.copy.copy_(source.detach())
            entry.version, entry.pointer, entry.stamp = source._version, source.data_ptr(), _tick()
            return _share(source, entry)
    entry = _Entry(owner, _drop)
    entry.copies, entry.key = copies, key
    if source.numel() >= KEEP_FROM and _is_weight(owner):
        entry.layout = _layout(source)
        if ledger.listeners:
            ledger.tell(source, dtype)
        entry.copy = _converted(source.detach(), dtype)
        result = _share(source, entry)
    else:
        entry.layout = None
        result = entry.copy = convert(source, dtype)
        if not _is_weight(owner):
            if len(copies.activations) >= MOST_ACTIVATIONS:
                drop_activations()
            copies.activations.append(key)
    entry.version, entry.pointer, entry.stamp = source._version, source.data_ptr(), _tick()
    entries[key] = entry
    return result


def drop_activations() -> None:
    """Drop the copies of what is no weight: a norm or the like was met, after which its uses are over.

    Layers that take the same activation stand side by side. To hold a copy for longer, as of a batch that
    only the first layer takes, would raise the peak of the memory in use.
    """
    copies = _local.copies
    if copies.activations:
        for key in copies.activations:
            copies.entries.pop(key, None)
        copies.activations.clear()


def _share(source: Tensor, entry: _Entry) -> Tensor:
    """The values of the copy as a tensor of its own, with an edge to ``source`` where autograd records."""
    if source.requires_grad and torch.is_grad_enabled():
        return edge(source, entry.copy, _to_free(entry))
    return entry.copy.detach()


def _to_free(entry: _Entry) -> _Entry | None:
    """``entry``, if its copy is one that a backward frees."""
    return entry if entry.layout else None


def low_copy(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, _Entry | None]:
    """The values of ``weight`` in ``dtype`` without an edge, and what its backward gives to `free`.

    To be called where autograd does not record.
    """
    if _torch.is_traced() or weight.numel() < SHARE_FROM:
        return convert(weight, dtype), None
    copy = cast_plainly(weight, dtype)
    entry = _local.copies.entries.get((id(weight), dtype, None))
    return copy, None if entry is None else _to_free(entry)


def free(entry: _Entry | None) -> None:
    """A backward has used the copy for the last time."""
    if entry is not None and not entry.copies.keeps:
        _drop(entry)


def edge(source: Tensor, copy: Tensor, entry: _Entry | None = None) -> Tensor:
    """``copy`` with an edge to ``source``, whose backward frees ``entry``."""
    return _Edge.apply(source, copy, entry)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def kept_past_backward() -> Iterator[None]:
    """A backward that this thread runs here leaves the copies of large weights for the next region.

    For micro-batches that add up: all gradients are there when a backward begins, too, where the copies are
    needed, so that the peak is there and no higher for it.
    """
    copies = _local.copies
    before, copies.keeps = copies.keeps, True
    try:
        yield
    finally:
        copies.keeps = before


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_leaf and (tensor.requires_grad or type(tensor) is torch.nn.Parameter)


@dataclass(frozen=True)
class CastCopy:
    """One copy that is held.

    Attributes:
        shape: of the copy.
        dtype: of the copy.
        device: of the copy.
        nbytes: its size in bytes.
        pointer: where its memory begins.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    pointer: int


@dataclass(frozen=True)
class CastCache:
    """What the cast caches of all threads held when `cast_cache` was called.

    Attributes:
        copies: one record per copy.
    """

    copies: tuple[CastCopy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self.copies)

    def clear(self) -> None:
        """Drop every copy, in all threads. Safe at any time: a copy in use lives until its use is over."""
        for copies in _every_thread():
            copies.entries.clear()


def _every_thread() -> list[_Copies]:
    with _lock:
        return list(_all_copies)


def cast_cache() -> CastCache:
    """What is held now, in all threads; its ``clear`` drops it."""
    found = []
    for copies in _every_thread():
        for entry in list(copies.entries.values()):
            copy = entry.copy
            found.append(CastCopy(tuple(copy.shape), copy.dtype, copy.device, copy.nbytes, copy.data_ptr()))
    return CastCache(tuple(found))
