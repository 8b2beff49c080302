"""Trees of values as JSON and tensors: back as they were, and what cannot be kept is named."""

from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from floatplan.checkpoint.trees import Gap, Missing, Packer, missing_in, unpack

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(dtype for name, dtype in vars(torch).items() if name.startswith("float8_")),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    plain = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    made = plain.view(dtype).view(shape)
    return made.movedim(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.complex_numbers()
    | st.sampled_from([torch.float8_e5m2, torch.int64, torch.device("cuda:1")])
    | st.just(80_000).map(lambda bits: 2**bits + 1)
)
keys = st.text() | st.integers() | st.none() | st.tuples(st.booleans(), st.text())
trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value: Any, place: str = "x") -> tuple[Any, list[Gap]]:
    """Through the bytes of both files."""
    packer = Packer()
    text = json.dumps(packer.pack(place, value), allow_nan=False)
    return unpack(json.loads(text), load(save(packer.tensors))), packer.gaps


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype is other.dtype
            and one.shape == other.shape
            and one.requires_grad == other.requires_grad
            and one.contiguous().view(-1).view(torch.uint8).tolist()
            == other.contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)


@given(trees)
def test_every_tree_comes_back_as_it_was(tree: Any) -> None:
    back, gaps = there_and_back(tree)
    assert same(back, tree)
    assert gaps == []


def test_a_tensor_in_two_places_is_one_again_and_is_stored_once() -> None:
    x = torch.arange(6.0)
    packer = Packer()
    packed = packer.pack("x", [x, x, x.view(2, 3), x[1:], x.detach()])
    assert [len(packer.tensors), packer.tensors["0"].shape] == [3, x.shape]
    one, two, matrix, rest, detached = unpack(packed, load(save(packer.tensors)))
    assert one is two
    assert one is detached
    assert torch.equal(matrix, x.view(2, 3))
    assert torch.equal(rest, x[1:])


def test_conjugates_leaves_and_strides() -> None:
    z = torch.complex(torch.ones(2), torch.tensor([2.0, -0.0]))
    leaf = torch.ones(2, requires_grad=True)
    wide = torch.zeros(1).expand(4, 3)
    (conjugate, imaginary, back, grown, parameter), gaps = there_and_back(
        [z.conj(), z.conj().imag, leaf, wide, torch.nn.Parameter(torch.ones(1), requires_grad=False)]
    )
    assert torch.equal(conjugate, z.conj().resolve_conj())
    assert torch.equal(imaginary, -z.imag)
    assert back.requires_grad
    assert back.is_leaf
    assert torch.equal(grown, wide)
    assert not parameter.requires_grad
    grown[0] = 1  # its own memory
    assert grown.sum() == 3
    assert gaps == []


class Colour(enum.IntEnum):
    RED = 3


class Word(str, enum.Enum):
    YES = "yes"


class Pair(NamedTuple):
    left: Any
    right: Any


class Own:
    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")


class OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "back", "gap"),
    [
        (Own(), Missing, "test_trees.Own"),
        ({1, 2}, Missing, "set"),
        (b"x", Missing, "bytes"),
        (np.ones(2), Missing, "numpy.ndarray"),
        (len, Missing, "builtin_function_or_method"),
        (slice(1), Missing, "slice"),
        (torch.eye(2).to_sparse(), Missing, "sparse_coo tensor"),
        (torch.ones(2, device="meta"), Missing, "tensor without numbers, on the device meta"),
        (torch.zeros(2, dtype=torch.bits8), Missing, "tensor of bits8"),
        (torch.ones(2).as_subclass(OwnTensor), Missing, "test_trees.OwnTensor"),
        (Colour.RED, 3, "test_trees.Colour"),
        (Word.YES, "yes", "test_trees.Word"),
        (np.float64(0.5), 0.5, "numpy.float64"),
        (Pair(1, 2), (1, 2), "test_trees.Pair"),
        (torch.Size([2, 3]), (2, 3), "torch.Size"),
        (collections.OrderedDict(a=1), {"a": 1}, "collections.OrderedDict"),
        (collections.UserDict(a=1), {"a": 1}, "collections.UserDict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_named(value: object, back: object, gap: str) -> None:
    (found, after), (only,) = there_and_back([value, 7], "args")
    kept = "" if back is Missing else type(back).__name__
    assert only == Gap("args[0]", gap, kept)
    assert found == (Missing(gap) if back is Missing else back)
    assert after == 7
    assert missing_in([found]) is (back is Missing)
    assert str(only) == f"args[0] ({gap}{f', kept as a {kept}' if kept else ''})"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_named() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    _, (gap,) = there_and_back({"x": (nested,)}, "kwargs")
    assert (gap.place, gap.kind) == ("kwargs['x'][0]", "nested tensor")


def test_keys_that_cannot_be_shown_are_called_by_their_type() -> None:
    back, (gap,) = there_and_back({2**80_000: Own()})
    assert back == {2**80_000: Missing("test_trees.Own")}
    assert gap.place == "x[<int>]"


def test_trees_that_have_no_end() -> None:
    around: list[Any] = [1]
    around.append(around)
    back, (gap,) = there_and_back(around)
    assert back == [1, Missing("list that contains itself")]
    assert gap.place == "x[1]"
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    _, (gap,) = there_and_back(deep)
    assert gap.kind == "list inside of 100 others"


@pytest.mark.parametrize(
    "packed",
    [
        {"tensor": {"name": "5"}},
        {"tensor": {"name": "0", "dtype": "os.system"}},
        {"tensor": {"name": "0", "more": 1}},
        {"eval": "1"},
        {"tuple": [], "dict": {}},
        {},
        {"int": "zz"},
        {"float": "x"},
        {"dtype": "load"},
        {"device": "nowhere"},
        {"items": [[[], 1]]},
        {"items": [1]},
        {"dict": []},
    ],
    ids=str,
)
def test_what_was_not_packed_is_refused_and_runs_nothing(packed: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, RuntimeError)):
        unpack(packed, {"0": torch.ones(3)})
