"""A plan on a model: which precision each module then runs in, and that nothing else about it changes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan import policy
from floatplan.engine import attach
from floatplan.policy import ModuleRule

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def plan_of(default: str, *rules: tuple[str, str], **ops: tuple[str, ...]) -> fp.Plan:
    """A plan of (module, precision) rules; ``ops`` go to the last."""
    made = [ModuleRule(module, precision) for module, precision in rules]
    if ops:
        made[-1] = ModuleRule(made[-1].module, made[-1].precision, tuple(ops.items()))
    return fp.Plan(default, tuple(made))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.mlp(self.norm(x)) * scale


class Net(nn.Module):
    """Two blocks in a ModuleList, which has no forward, and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


X = torch.randn(3, 8)


def dtypes(model: nn.Module, *inputs: Any) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Dtype that goes into and comes out of each module that is called, as its hooks see it."""
    seen = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if args:
            first = result[0] if isinstance(result, tuple) else result
            seen[name] = args[0].dtype, first.dtype

    handles = [
        module.register_forward_hook(functools.partial(note, name)) for name, module in model.named_modules()
    ]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return seen


# --- Which precision --------------------------------------------------------------------------------------


def test_each_module_runs_in_what_the_plan_says() -> None:
    model = Net()
    plan_of("bf16", ("blocks.*.mlp", "fp32"), ("blocks.1.mlp.0", "bf16")).apply(model)
    seen = dtypes(model, X)
    assert seen["embed"] == (FP32, BF16)
    assert seen["blocks.0.mlp"] == (BF16, FP32)  # hooks see what the caller gives; inside it is float32
    assert seen["blocks.0.mlp.0"] == (FP32, FP32)
    assert seen["blocks.0.mlp.2"] == (FP32, FP32)
    assert seen["blocks.1.mlp.0"] == (FP32, FP32)  # bf16 inside, back in float32 for its float32 parent
    assert seen["blocks.1.mlp.2"] == (FP32, FP32)
    assert seen["head"] == (FP32, BF16)
    assert seen[""] == (FP32, BF16)


def test_a_16_bit_island_in_a_float32_model() -> None:
    torch.manual_seed(0)
    model = Net()
    exact = model(X)
    plan_of("fp32", ("blocks.0", "bf16")).apply(model)
    seen = dtypes(model, X)
    assert seen["blocks.0.mlp.0"] == (FP32, BF16)
    assert seen["blocks.0.mlp.2"] == (BF16, BF16)
    assert {seen[name] for name in ("", "embed", "blocks.0", "blocks.1", "head")} == {(FP32, FP32)}
    assert not torch.equal(model(X), exact)
    torch.testing.assert_close(model(X), exact, rtol=0.05, atol=0.05)
    fp.Plan.remove(model)
    assert torch.equal(model(X), exact)


def test_a_float32_model_takes_16_bit_inputs() -> None:
    model = Net()
    plan_of("fp32").apply(model)
    assert torch.equal(model(X.bfloat16()), model(X.bfloat16().float()))
    with fp.autocast("cpu", dtype=BF16):
        assert model(X.bfloat16()).dtype is FP32


def test_convolutional_network() -> None:
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 8, 3, padding=1),
            norm=nn.BatchNorm2d(8),
            conv2=nn.Conv2d(8, 8, 3, padding=1),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(8, 4),
        )
    )
    plan_of("bf16", ("conv2", "fp32"), ("head", "fp32")).apply(model)
    seen = dtypes(model, torch.randn(2, 3, 8, 8))
    assert seen["conv1"] == (FP32, BF16)
    assert seen["norm"] == (BF16, BF16)
    assert seen["conv2"] == (BF16, FP32)
    assert seen["head"] == (FP32, FP32)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {FP32}


def test_transformer() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, 16)
    exact = model(x)
    plan_of("bf16", ("layers.1", "fp32"), ("layers.*.norm?", "fp32")).apply(model)
    seen = dtypes(model, x)
    assert seen["layers.0.linear1"][1] is BF16
    assert seen["layers.0.norm1"][1] is FP32
    assert seen["layers.1.linear1"] == (FP32, FP32)
    torch.testing.assert_close(model(x).float(), exact, rtol=0.05, atol=0.05)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x).float(), exact, rtol=0.05, atol=0.05)


def test_ops_of_a_rule() -> None:
    model = Net()
    plan_of("bf16", ("blocks.0.mlp", "bf16"), fp32=("aten::linear",), untouched=("aten::gelu",)).apply(model)
    seen = dtypes(model, X)
    assert seen["blocks.0.mlp.0"] == (BF16, FP32)
    assert seen["blocks.0.mlp.2"] == (FP32, FP32)
    assert seen["blocks.1.mlp.0"][1] is seen["blocks.1.mlp.2"][1] is BF16


def test_a_rule_on_a_list_reaches_the_modules_in_it() -> None:
    """A ModuleList has no forward that could hold a region."""
    model = Net()
    plan_of("bf16", ("blocks", "fp32")).apply(model)
    seen = dtypes(model, X)
    assert seen["embed"][1] is seen["head"][1] is BF16
    assert seen["blocks.0.mlp.0"] == seen["blocks.1.mlp.2"] == (FP32, FP32)
    assert type(model.blocks) is nn.ModuleList
    parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    plan_of("bf16", ("b", "fp32")).apply(parts)
    assert [parts[name](X).dtype for name in "ab"] == [BF16, FP32]
    fp.Plan.remove(parts)
    plan_of("fp32", ("b", "bf16")).apply(parts)
    assert [parts[name](X).dtype for name in "ab"] == [FP32, BF16]  # no float32 module is around it


def test_only_modules_where_the_decision_changes_are_touched() -> None:
    model = Net()
    plan_of("bf16", ("blocks.*.mlp", "fp32"), ("head", "bf16")).apply(model)
    touched = {name for name, module in model.named_modules() if isinstance(module, attach._Attached)}
    assert touched == {"", "blocks.0.mlp", "blocks.1.mlp", "head"}
    assert type(model.blocks[0].mlp) is type(model.blocks[1].mlp)


class Pair(NamedTuple):
    a: Tensor
    b: int


class Output(OrderedDict[str, Any]):
    """A mapping with more than its items, as libraries return."""

    label = "none"


class Takes(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = args, kwargs
        return args[0]


def test_a_float32_region_takes_trees_of_inputs_up() -> None:
    inner, low, double, whole = Takes(), X.bfloat16(), X.double(), torch.arange(3)
    model = nn.ModuleDict({"inner": inner})
    plan_of("fp32").apply(model)
    output = Output(x=low, y=1)
    output.label = "kept"
    untouched = {"cache": [X, double]}
    inner([low, (low, 2)], Pair(low, 1), double, whole, X, output, untouched, half=X.half(), plain={"x": low})
    (lists, pair, same, integers, wide, mapping, cache), kwargs = inner.got
    assert lists[0].dtype is lists[1][0].dtype is pair.a.dtype is mapping["x"].dtype is FP32
    assert isinstance(pair, Pair)
    assert isinstance(mapping, Output)
    assert mapping.label == "kept"
    assert output["x"] is low  # the caller's own is as it was
    assert same is double
    assert integers is whole
    assert wide is X
    assert cache is untouched  # a module may write into what it is given
    assert kwargs["half"].dtype is kwargs["plain"]["x"].dtype is FP32
    assert torch.equal(lists[0], low.float())


# --- Equal to regions by hand -----------------------------------------------------------------------------


class ByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        with fp.autocast("cpu", dtype=BF16):
            x = self.embed(x)
            for block in self.blocks:
                normed = block.norm(x)
                with fp.autocast("cpu", enabled=False):
                    wide = block.mlp(normed.float())
                x = x + wide * 1.0
            return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_the_same_regions_by_hand(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model, hand = Net(64), ByHand(64)
    hand.load_state_dict(model.state_dict())
    plan_of("bf16", ("blocks.*.mlp", "fp32")).apply(model)
    optimizers = [kind(each.parameters(), lr=0.01) for each in (model, hand)]  # type: ignore[call-arg]
    for _ in range(4):
        x = torch.randn(16, 64)
        losses = []
        for each, optimizer in zip((model, hand), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(x).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert torch.equal(*losses)
    for ours, theirs in zip(model.parameters(), hand.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)


def test_a_plan_wins_over_a_region_around_the_model() -> None:
    model = Net()
    plan_of("bf16").apply(model)
    with torch.autocast("cpu", dtype=torch.float16), fp.autocast("cpu", enabled=False):
        assert model(X).dtype is BF16


def test_the_plan_is_the_value_of_the_policy_room() -> None:
    value = policy.Plan.parse(plan_of("bf16", ("head", "fp32")).text)
    ours = fp.Plan.parse(value.text)
    assert type(ours) is fp.Plan
    assert ours == value
    assert value == ours
    assert hash(ours) == hash(value)
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert type(copy.deepcopy(ours)) is fp.Plan
