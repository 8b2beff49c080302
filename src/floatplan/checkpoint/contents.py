"""What a checkpoint may hold: what ``torch.load(weights_only=True)`` reads. It runs no code of the file."""

from __future__ import annotations

import enum
import os
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from floatplan.errors import CheckpointError

_PLAIN = {
    *(types.NoneType, bool, float, complex, str, bytes, bytearray),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_SEQUENCES = {list, tuple, set}
_MAPPINGS = {dict, OrderedDict, Counter}
# The reader knows integers whose length in bytes is written in one byte.
_INT_BITS = 8 * 255 - 1

KINDS = (
    "tensors, numbers, strings, bytes, None, dtypes, devices, sizes; lists, tuples, sets and dicts of those"
)


def check(name: str, value: object) -> None:
    """Raises CheckpointError, naming the place, unless ``value`` can be loaded from a checkpoint."""
    for place, found, advice in _refused(name, value, ()):
        kind = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(f"{place} is {_article(kind)}, which a checkpoint cannot hold; {advice}")


def _refused(place: str, value: Any, around: tuple[int, ...]) -> Iterator[tuple[str, object, str]]:
    """(place, value, what to do) of everything in ``value`` that cannot be loaded again."""
    kind = type(value)
    if kind is bytes and not value:
        # Pickled as a call of ``bytes``, which the reader does not make.
        yield place, value, "it is empty; save None or a bytearray"
    if kind in _PLAIN:
        return
    if kind is int:
        if value.bit_length() > _INT_BITS:
            yield place, value, f"it has more than {_INT_BITS} bits; save str() of it"
        return
    if id(value) in around:
        yield place, value, "it contains itself; save the parts"
        return
    around = (*around, id(value))
    if kind in _MAPPINGS:
        for key, inner in value.items():
            yield from _refused(f"key {key!r} of {place}", key, around)
            yield from _refused(f"{place}[{key!r}]", inner, around)
    elif kind in _SEQUENCES:
        for number, inner in enumerate(value):
            yield from _refused(f"{place}[{number}]", inner, around)
    elif kind not in _TENSORS and kind not in _allowed_by_user():
        yield place, value, _advice(value)
        return
    # torch pickles the attributes of a tensor and of an OrderedDict, such as the versions in a state_dict.
    if kind in _TENSORS or kind is OrderedDict:
        for key, inner in vars(value).items():
            yield from _refused(f"{place}.{key}", inner, around)


def _allowed_by_user() -> set[object]:
    return {
        entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()
    }


# The first that fits is given.
_ADVICE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda value: hasattr(value, "state_dict") and not isinstance(value, type),
        "save its state_dict(), or give the object to save by a keyword of its own",
    ),
    (lambda value: isinstance(value, torch.Generator), "save its get_state(), or give it by a keyword"),
    (lambda value: isinstance(value, torch.Tensor), "save a plain tensor made of it"),
    (
        lambda value: type(value).__module__ == "numpy" and hasattr(value, "shape"),
        "save torch.as_tensor of it",
    ),
    (lambda value: isinstance(value, enum.Enum), "save its name or its value"),
    (lambda value: isinstance(value, os.PathLike), "save str() of it"),
    (lambda value: isinstance(value, dict), "save dict() of it"),
    (lambda value: isinstance(value, tuple), "save tuple() of it"),
    (lambda value: isinstance(value, (set, frozenset)), "save set() of it"),
    (lambda value: isinstance(value, list), "save list() of it"),
    (lambda value: isinstance(value, str), "save str() of it"),
    (lambda value: isinstance(value, (int, float)), "save int() or float() of it"),
    (callable, "leave it out, and make it anew after loading"),
)


def _advice(value: object) -> str:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return "save its item()"
    found = next((advice for fits, advice in _ADVICE if fits(value)), f"it may hold {KINDS}")
    return (
        f"{found} (or allow its class with torch.serialization.add_safe_globals, before saving and loading)"
        if found.startswith("it may hold")
        else found
    )


def _article(kind: str) -> str:
    return f"an object of type {kind}" if "." in kind else f"a {kind}"
