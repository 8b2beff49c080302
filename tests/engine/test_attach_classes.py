"""Putting a plan on a model and taking it away changes the classes of modules, and nothing else."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attach import Block, Net, X, dtypes, plan_of
from torch import Tensor, nn

import floatplan as fp
from floatplan.engine import attach
from floatplan.errors import PlanError, PolicyError, RegionError

BF16, FP32 = torch.bfloat16, torch.float32


# --- Nothing else changes -----------------------------------------------------------------------------


def test_the_model_looks_as_before() -> None:
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    before = dict(vars(model))
    plan_of("bf16", ("blocks.*.mlp", "fp32")).apply(model)
    assert vars(model) == before
    assert isinstance(model, Net)
    assert isinstance(model.blocks[0].mlp, nn.Sequential)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), attribute) == getattr(Net, attribute)
    assert repr(model) == repr(reference)
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(Net.forward)
    assert inspect.getsource(model.forward) == inspect.getsource(Net.forward)
    assert list(model.state_dict()) == list(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in reference.named_modules()]
    assert len(model.blocks[0].mlp) == 3
    assert model.blocks[0].mlp[0].in_features == 8


def test_remove_restores_the_classes() -> None:
    model = Net()
    before = {name: type(module) for name, module in model.named_modules()}
    plan = plan_of("bf16", ("blocks.*.mlp", "fp32"))
    for _ in range(3):
        plan.apply(model)
        plan.remove(model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model(X).dtype is FP32
    plan.remove(model)  # a model without regions is left as it is
    plan.apply(model)
    model.half_of_it = model.blocks[0]
    plan.remove(model.blocks[0])
    assert type(model.blocks[0].mlp) is nn.Sequential
    assert type(model.blocks[1].mlp) is not nn.Sequential
    plan.remove(model)


def by_pickle(protocol: int) -> Callable[[Any], Any]:
    return lambda model: pickle.loads(pickle.dumps(model, protocol))


def by_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, by_torch_save, *(by_pickle(n) for n in range(6))]
)
def test_copies_are_plain_modules(duplicate: Callable[[Any], Any]) -> None:
    model = Net()
    exact = model(X)
    plan_of("bf16", ("blocks.*.mlp", "fp32")).apply(model)
    twin = duplicate(model)
    assert type(twin) is Net
    if duplicate is not copy.copy:  # a shallow copy holds the same children
        assert not any(isinstance(module, attach._Attached) for module in twin.modules())
        assert torch.equal(twin(X), exact)
    assert model(X).dtype is BF16
    assert list(twin.state_dict()) == list(model.state_dict())


def test_a_pickle_needs_no_floatplan() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plan_of("bf16").apply(model)
    for protocol in range(6):
        assert b"floatplan" not in pickle.dumps(model, protocol)


class OwnCopy(nn.Linear):
    """Copies itself as torch's parametrized modules do, and pickles in a way of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        twin = self.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __copy__(self) -> OwnCopy:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.in_features, self.out_features)


def test_copies_that_a_class_makes_itself() -> None:
    model = nn.Sequential(OwnCopy(4, 4))
    model.append(model[0])
    plan_of("fp32", ("*", "bf16")).apply(model)
    twin = copy.deepcopy(model)
    assert type(twin[0]) is OwnCopy
    assert twin[0] is twin[1]
    assert copy.copy(model[0]) is model[0]
    assert type(model[0]) is not OwnCopy
    assert type(pickle.loads(pickle.dumps(model[0]))) is OwnCopy


def test_parametrized_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    before = type(model[0])
    plan_of("fp32", ("0", "bf16")).apply(model)
    assert model[0](torch.randn(2, 4)).dtype is FP32
    assert type(copy.deepcopy(model)[0]) is before
    fp.Plan.remove(model)
    assert type(model[0]) is before


class Registering(nn.Linear):
    kinds: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kinds.append(cls)


class Meta(type):
    pass


class Slotted(nn.Module, metaclass=Meta):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    @property
    def double(self) -> float:
        return 2 * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T * self.double


def test_unusual_classes() -> None:
    model = nn.Sequential(Registering(8, 8), Slotted())
    plan = plan_of("fp32", ("*", "bf16"))
    plan.apply(model)
    assert Registering.kinds == []
    assert type(type(model[1])) is Meta
    assert model[1].double == 4.0
    assert model[0](X).dtype is model[1](X).dtype is FP32  # widened for the float32 model
    plan.remove(model)
    assert type(model[1]) is Slotted


def test_a_class_changed_later_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Block())
    plan_of("bf16", ("0", "bf16")).apply(model)
    monkeypatch.setattr(Block, "forward", lambda self, x: self.mlp[0](x))
    assert model(X).shape == (3, 16)


# --- Tied modules ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 8))
        self.decode = nn.Sequential(self.encode[0], nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))  # type: ignore[no-any-return]


def test_tied_modules() -> None:
    model = Tied()
    with pytest.raises(PlanError, match=r"both 'encode\.0' and 'decode\.0'.*bf16 \(default\).*fp32 \(rule 1"):
        plan_of("bf16", ("decode", "fp32")).apply(model)
    assert type(model) is Tied
    plan = plan_of("bf16", ("decode", "fp32"), ("*code.0", "bf16"))
    plan.apply(model)
    seen = dtypes(model, X)
    assert seen["encode.0"][1] is FP32  # one object, one region; it is also a part of a float32 module
    assert seen["decode.1"] == (FP32, FP32)
    plan.remove(model)
    assert type(model.encode[0]) is nn.Linear


# --- Errors leave the model as it was -------------------------------------------------------------------


def test_what_does_not_fit_changes_nothing() -> None:
    model = Net()
    before = {name: type(module) for name, module in model.named_modules()}
    for plan, kind, said in (
        (plan_of("bf16", ("head", "fp32"), ("*.0.mpl", "fp32")), PlanError, r"rule 2 .*; did you mean "),
        (plan_of("bf16", ("head", "bf16"), fp32=("aten::linaer",)), PolicyError, "aten::linaer"),
        (plan_of("bf16", ("head", "bf16"), fp32=("aten::add_",)), PolicyError, "add_"),
    ):  # fmt: skip
        with pytest.raises(kind, match=said):
            plan.apply(model)
        assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(RegionError, match="no floatplan region for device type 'abacus'"):
        plan_of("bf16").apply(model, device_type="abacus")
    with pytest.raises(PlanError, match=r"a torch\.nn\.Module, got list"):
        plan_of("bf16").apply([model])  # type: ignore[arg-type]
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_applied_twice() -> None:
    model = Net()
    plan = plan_of("bf16", ("blocks.*.mlp", "fp32"))
    plan.apply(model)
    with pytest.raises(PlanError, match=r"module '' has a region of a plan already; plan\.remove\(model\)"):
        plan.apply(model)
    with pytest.raises(PlanError, match=r"module '0\.blocks\.0\.mlp' has a region|module '0' has a region"):
        plan_of("fp32").apply(nn.Sequential(model))
    plan.remove(model)
    plan.apply(model, torch.device("cpu", 0))
    assert model(X).dtype is BF16


def test_devices() -> None:
    model = Net()
    model.head.to("meta")
    with pytest.raises(PlanError, match=r"cpu \('embed\.weight'\), meta \('head\.weight'\); .*device_type="):
        plan_of("bf16").apply(model)
    plan_of("bf16").apply(model, "cpu")
    model = nn.Sequential(nn.Flatten())
    plan_of("bf16").apply(model)
    assert model(X).dtype is FP32


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield x @ x.T


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_modules_that_cannot_carry_a_region() -> None:
    lazy = nn.LazyLinear(4)
    replaced = nn.Linear(8, 8)
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    traced = torch.jit.trace(nn.Linear(8, 8), X)
    for module, said in (
        (lazy, "it is lazy"),
        (replaced, "its forward was replaced on the object"),
        (Steps(), "generator or coroutine"),
        (traced, "TorchScript"),
        (nn.MultiheadAttention(8, 2).out_proj, r"nn\.MultiheadAttention reads its weight"),
    ):
        model = nn.Sequential(nn.Linear(8, 8), module)
        with pytest.raises(PlanError, match=rf"module '1' \(\w+\) cannot carry a region: .*{said}"):
            plan_of("bf16", ("*", "fp32")).apply(model)
        assert type(model) is nn.Sequential
        plan_of("bf16", ("0", "fp32")).apply(model)  # where no region is needed, it is no hindrance


def test_a_class_that_another_library_put_on_top() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan_of("bf16", ("1", "fp32")).apply(model)
    above = type(model[1])
    model[1].__class__ = type("Sharded", (above,), {})
    with pytest.raises(PlanError, match=r"class of module '1' was changed after .* to Sharded"):
        fp.Plan.remove(model)
    assert isinstance(model, attach._Attached)
    assert model(X).dtype is FP32
    model[1].__class__ = above
    fp.Plan.remove(model)
    assert type(model) is nn.Sequential


class Frozen(nn.Module):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


def test_a_module_that_guards_its_attributes() -> None:
    model = Frozen()
    plan_of("bf16").apply(model)
    assert model(X).dtype is BF16
    fp.Plan.remove(model)
    assert type(model) is Frozen


def test_all_or_nothing_where_a_class_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    real = attach._set_class

    def refuse(module: nn.Module, cls: type[nn.Module]) -> None:
        if module is model.head and cls is not nn.Linear:
            raise TypeError("layout differs")
        real(module, cls)

    monkeypatch.setattr(attach, "_set_class", refuse)
    with pytest.raises(PlanError, match="a Linear does not let its class change: layout differs"):
        plan_of("bf16", ("head", "fp32")).apply(model)
    assert type(model) is Net
    assert type(model.head) is nn.Linear
