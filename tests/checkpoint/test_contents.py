"""What a checkpoint may hold comes back as it was; anything else is refused before a byte is written."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import floatplan as fp

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)

VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 255, 70_000, 2**31, -(2**63), 10**300],
    "floats": [0.1, math.inf, -math.inf, -0.0, 5e-324],
    "complex": 1 - 2j,
    "text": ["", "ä 中 \x00", "x" * 70_000],
    "bytes": [b"\x00\xff", bytearray(b"ab"), bytearray()],
    "dicts": {"a": {1: {2.0: {None: {("b", 3): []}}}}},
    "ordered": OrderedDict(b=1, a=[2]),
    "counter": Counter("abca"),
    "tuples": [(), (1,), (1, (2, (3,)))],
    "set": {1, "a"},
    "dtypes": [dtype for dtype in DTYPES if dtype.itemsize],
    "devices": [torch.device("cpu"), torch.device("cuda:3")],
    "layout": torch.sparse_coo,
    "size": torch.Size([2, 3]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str, tmp_path: Path) -> None:
    fp.save(tmp_path / "a.pt", rng=False, **{name: VALUES[name]})
    loaded = fp.load(tmp_path / "a.pt")
    assert loaded == {name: VALUES[name]}
    assert type(loaded[name]) is type(VALUES[name])


TENSORS = {
    "float": torch.tensor([0.1, math.nan, math.inf]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.tensor([0.1], dtype=torch.bfloat16),
    "float8": torch.tensor([0.5]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "uint32": torch.tensor([2**32 - 1], dtype=torch.uint32),
    "view": torch.arange(6.0).reshape(2, 3).t(),
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]
    fp.save(tmp_path / "a.pt", rng=False, tensor=[tensor, {"twice": tensor}])
    loaded, other = fp.load(tmp_path / "a.pt")["tensor"]
    assert type(loaded) is type(tensor)
    assert (loaded.dtype, loaded.requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert loaded is other["twice"]
    if tensor.is_sparse:
        loaded, tensor = loaded.to_dense(), tensor.to_dense()
    bits = torch.uint8 if tensor.dim() else tensor.dtype
    assert torch.equal(loaded.detach().contiguous().view(bits), tensor.detach().contiguous().view(bits))


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


def itself() -> list[object]:
    ring: list[object] = [1]
    ring.append(ring)
    return ring


def marked_tensor() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.owner = itself
    return tensor


REFUSED = {
    "function": (lambda: 1, r"entry is a function, .*; leave it out, and make it anew"),
    "class": ({"a": nn.Linear}, r"entry\['a'\] is a type, .*; leave it out"),
    "module": ([nn.Linear(1, 1)], r"entry\[0\] is an object of type .*Linear, .*; save its state_dict\(\)"),
    "generator": ({"g": torch.Generator()}, r"entry\['g'\] .* save its get_state\(\)"),
    "default dict": ({"a": {3: defaultdict(int)}}, r"entry\['a'\]\[3\] is .*defaultdict.*; save dict\(\)"),
    "named tuple": ([Point(1, 2)], r"entry\[0\] .*Point.*; save tuple\(\) of it"),
    "enum": ((1, Colour.RED), r"entry\[1\] .*Colour.* save its name or its value"),
    "path": (Path("a"), r"save str\(\) of it"),
    "frozen set": (frozenset("a"), r"save set\(\) of it"),
    "array": ({"a": np.ones(3)}, r"entry\['a'\] .*numpy.ndarray.*; save torch.as_tensor of it"),
    "numpy number": (np.float64(1.0), r"numpy.float64.*; save its item\(\)"),
    "object": (object(), r"it may hold tensors, .*add_safe_globals"),
    "range": (range(3), r"is a range"),
    "key": ({"a": {Colour.RED: 1}}, r"key .*RED.* of entry\['a'\] is an object of type"),
    "huge": (10**1000, r"entry is a int.*more than 2039 bits"),
    "empty bytes": ([b""], r"entry\[0\] is a bytes.*; it is empty"),
    "itself": (itself(), r"entry\[1\] .*contains itself"),
    "attribute": ([marked_tensor()], r"entry\[0\].owner is a function"),
    "tensor subclass": (type("Mine", (torch.Tensor,), {})(), "save a plain tensor made of it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_writing(name: str, tmp_path: Path) -> None:
    value, said = REFUSED[name]
    fp.save(tmp_path / "a.pt", entry="old")
    with pytest.raises(fp.CheckpointError, match=said):
        fp.save(tmp_path / "a.pt", good=torch.ones(1), entry=value)
    assert fp.load(tmp_path / "a.pt") == {"entry": "old"}
    with pytest.raises(fp.CheckpointError, match=said):
        fp.save(tmp_path / "new" / "a.pt", entry=value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_state_that_holds_a_function_names_its_place(tmp_path: Path) -> None:
    class Schedule:
        def state_dict(self) -> dict[str, object]:
            return {"base": 1, "curve": [math.sin]}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with pytest.raises(fp.CheckpointError, match=r"^schedule\['curve'\]\[0\] is a builtin_function"):
        fp.save(tmp_path / "a.pt", schedule=Schedule())


class Allowed:
    def __init__(self, inner: object) -> None:
        self.inner = inner


class NotAllowed:
    pass


def test_classes_that_the_user_allowed(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Allowed]):
        fp.save(tmp_path / "a.pt", entry=[Allowed(3)])
        assert fp.load(tmp_path / "a.pt")["entry"][0].inner == 3
        with pytest.raises(fp.CheckpointError, match=r"loading it would need .*NotAllowed"):
            fp.save(tmp_path / "a.pt", entry=Allowed(NotAllowed()))
    with pytest.raises(fp.CheckpointError, match="add_safe_globals"):
        fp.load(tmp_path / "a.pt")
    with pytest.raises(fp.CheckpointError, match=r"^entry\[0\] is an object of type"):
        fp.save(tmp_path / "b.pt", entry=[Allowed(3)])


def schedulers(optimizer: torch.optim.Optimizer) -> list[object]:
    lr = torch.optim.lr_scheduler
    return [
        lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lr.MultiplicativeLR(optimizer, lambda epoch: 0.9),
        lr.StepLR(optimizer, 3),
        lr.MultiStepLR(optimizer, [2, 4]),
        lr.ConstantLR(optimizer),
        lr.LinearLR(optimizer),
        lr.ExponentialLR(optimizer, 0.9),
        lr.PolynomialLR(optimizer),
        lr.CosineAnnealingLR(optimizer, 10),
        lr.CosineAnnealingWarmRestarts(optimizer, 10),
        lr.CyclicLR(optimizer, 0.1, 0.2),
        lr.OneCycleLR(optimizer, 0.1, total_steps=10),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 9)], [1]),
        lr.ChainedScheduler([lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], optimizer=optimizer),
        torch.optim.swa_utils.SWALR(optimizer, 0.1),
    ]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step()")
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step.*")
def test_every_scheduler_of_torch_can_be_saved(tmp_path: Path) -> None:
    def made() -> list[object]:
        return schedulers(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))

    for number, (scheduler, fresh) in enumerate(zip(made(), made(), strict=True)):
        for _ in range(3):
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
        fp.save(tmp_path / f"{number}.pt", scheduler=scheduler)
        fp.load(tmp_path / f"{number}.pt", scheduler=fresh)
        assert fresh.last_epoch == scheduler.last_epoch if hasattr(fresh, "last_epoch") else True
        assert fresh.get_last_lr() == scheduler.get_last_lr()
