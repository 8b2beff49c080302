"""Trees of values as JSON, with their tensors beside it. Reading makes values and runs no code.

JSON's own values stand for themselves, and a list for a list. All else is an object with one key, which says
what it is: ``tuple``, ``dict`` (whose keys are strings), ``items`` (of any other dict), ``tensor``, ``float``
(one that JSON has not), ``int`` (a long one), ``complex``, ``dtype``, ``device``, ``missing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Json: TypeAlias = Any

_STORED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
}
_AS_BYTES = {name: dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
"""Stored as their bytes: files of safetensors know some of them, and older versions of it fewer."""
_COMPLEX = {torch.complex128, torch.complex64}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_LONG_INT = 64
"""Bits from which on integers are written in hexadecimal, whose length no reader limits."""
DEEPEST = 100
"""Trees within trees: readers of JSON give up somewhere."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What a bundle does not hold as it was.

    Attributes:
        place: such as ``args[0]['mask']``.
        kind: its type, or what is wrong with it.
        kept_as: the plain type that its content is kept in; "" if nothing is kept.
    """

    place: str
    kind: str
    kept_as: str = ""

    def __str__(self) -> str:
        return f"{self.place} ({self.kind}{f', kept as a {self.kept_as}' if self.kept_as else ''})"


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands in a tree that was read where something is missing."""

    kind: str


class Packer:
    """Packs trees into one JSON and one set of tensors.

    Attributes:
        tensors: contiguous, on the CPU, none sharing memory with another, by their names in the JSON.
        gaps: what was left out or kept as something plainer.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.gaps: list[Gap] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()
        self._alive: list[Tensor] = []

    def pack(self, place: str, value: Any, around: tuple[int, ...] = ()) -> Json:
        """``value`` as JSON; ``place`` is how gaps in it are called."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(place, value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        for base, plain, made in _PLAINER:
            if kind is not plain and isinstance(value, base):
                self.gaps.append(Gap(place, type_of(value), plain.__name__))
                return self.pack(place, made(value), around)
        if kind not in (dict, list, tuple):
            return self._missing(place, type_of(value))
        if id(value) in around:
            return self._missing(place, f"{kind.__name__} that contains itself")
        if len(around) == DEEPEST:
            return self._missing(place, f"{kind.__name__} inside of {DEEPEST} others")
        around = (*around, id(value))
        if kind is dict:
            items = [
                (key, self.pack(f"{place}[{_shown(key)}]", inner, around)) for key, inner in value.items()
            ]
            if all(type(key) is str for key in value):
                return {"dict": dict(items)}
            return {
                "items": [
                    [self.pack(f"key {_shown(key)} of {place}", key, around), one] for key, one in items
                ]
            }
        parts = [self.pack(f"{place}[{number}]", inner, around) for number, inner in enumerate(value)]
        return parts if kind is list else {"tuple": parts}

    def _missing(self, place: str, kind: str) -> Json:
        self.gaps.append(Gap(place, kind))
        return {"missing": kind}

    def _tensor(self, place: str, tensor: Tensor) -> Json:
        odd = _what_is_odd(tensor)
        if odd:
            return self._missing(place, odd)
        packed: dict[str, Any] = {"name": self._stored(tensor.detach())}
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype in _COMPLEX or name in _AS_BYTES:
            packed["dtype"] = name
        if tensor.requires_grad:
            packed["requires_grad"] = True
        return {"tensor": packed}

    def _stored(self, tensor: Tensor) -> str:
        """The name of what holds the numbers of ``tensor``; tensors that are the same have one."""
        key = (
            *(tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = self._names[key] = str(len(self.tensors))
        self._alive.append(tensor)  # its address is not given to another
        plain = tensor.resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        plain = plain.cpu().contiguous()
        plain = plain if plain.dtype in _STORED else plain.view(torch.uint8)
        if plain.untyped_storage().data_ptr() in self._storages:
            plain = plain.clone()
        self._storages.add(plain.untyped_storage().data_ptr())
        self.tensors[name] = plain
        return name


def _what_is_odd(tensor: Tensor) -> str:
    """Why a tensor cannot be kept; "" for one that can."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return type_of(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.device.type == "meta":
        return "tensor without numbers, on the device meta"
    known = tensor.dtype in _STORED or tensor.dtype in _COMPLEX or dtype in _AS_BYTES
    return "" if known else f"tensor of {dtype}"


def _shown(key: object) -> str:
    """How a place calls a key: also one whose own text cannot be had, as of an integer of 4,300 digits."""
    try:
        return repr(key)
    except Exception:
        return f"<{type_of(key)}>"


def type_of(value: object) -> str:
    """The qualified name of the type of ``value``, without that of Python's own module."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


_PLAINER: tuple[tuple[type, type, Callable[[Any], Any]], ...] = (
    (Mapping, dict, dict),
    (tuple, tuple, tuple),
    (list, list, list),
    (str, str, str.__str__),
    (int, int, int.__int__),
    (float, float, float.__float__),
)
"""What subclasses are kept as, by calls that those do not have a say in."""


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"float": str(value)}


def _int(value: int) -> Json:
    return value if value.bit_length() <= _LONG_INT else {"int": hex(value)}


_SCALARS: dict[type, Callable[[Any], Json]] = {
    float: _float,
    int: _int,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}


def unpack(packed: Json, tensors: Mapping[str, Tensor]) -> Any:
    """What `Packer.pack` was given; a tensor that stood in several places is one again.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: ``packed`` is not what it returned, or
            a tensor is not there.
    """
    made: dict[tuple[str, str, bool], Tensor] = {}

    def tensor(name: str, dtype: str = "", requires_grad: bool = False) -> Tensor:
        key = (name, dtype, requires_grad)
        if key not in made:
            found = tensors[name]
            if dtype in _AS_BYTES:
                found = found.view(_AS_BYTES[dtype])
            elif dtype:
                found = torch.view_as_complex(found)
            made[key] = found.detach().requires_grad_(requires_grad)
        return made[key]

    def value(packed: Json) -> Any:
        if isinstance(packed, list):
            return [value(one) for one in packed]
        if not isinstance(packed, dict):
            return packed
        ((tag, content),) = packed.items()
        return _UNPACKED[tag](content, value) if tag != "tensor" else tensor(**content)

    return value(packed)


_UNPACKED: dict[str, Callable[[Any, Callable[[Json], Any]], Any]] = {
    "tuple": lambda content, value: tuple(map(value, content)),
    "dict": lambda content, value: {key: value(one) for key, one in content.items()},
    "items": lambda content, value: {value(key): value(one) for key, one in content},
    "float": lambda content, value: float(content),
    "int": lambda content, value: int(content, 16),
    "complex": lambda content, value: complex(*map(value, content)),
    "dtype": lambda content, value: _DTYPES[content],
    "device": lambda content, value: torch.device(content),
    "missing": lambda content, value: Missing(str(content)),
}


def missing_in(tree: Any) -> bool:
    """Whether something in ``tree`` is missing."""
    if isinstance(tree, (list, tuple)):
        return any(map(missing_in, tree))
    if isinstance(tree, dict):
        return any(missing_in(key) or missing_in(value) for key, value in tree.items())
    return isinstance(tree, Missing)
