"""How far a step is from float32: healthy ones as far as their format explains, planted faults farther."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import planted
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp
from floatplan.tasks import RECIPES, Ingredients
from floatplan.tasks.batches import seed_all
from floatplan.watch.beside import distance
from floatplan.watch.draws import Draws
from floatplan.watch.drift import MOST, Distance, Drift, drift, explained

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The real float16 kernels, also where they are slow: this is about numbers.
POLICY = fp.Policy.unified(slow_kernels=True)
each_format = pytest.mark.parametrize("low", LOW)


def region(low: str) -> Callable[[], Any]:
    return lambda: fp.autocast("cpu", LOW[low], policy=POLICY)


def judged(model: nn.Module, closure: Callable[[], Tensor], low: str, scale: float = 1.0) -> Drift:
    found = drift(model, closure, region(low), scale=scale)
    assert isinstance(found, Drift), found
    return found


@each_format
@pytest.mark.parametrize("name", ["digits-linear", "digits"])
def test_built_in_tasks_stay_within_what_the_format_explains(
    low: str, name: str, figure: Callable[[str], None]
) -> None:
    seed_all(0)
    task = RECIPES[name].prepare(Ingredients(torch.device("cpu"), batch_size=16))()
    optimizer = task.optimizer(task.model.parameters())
    shares = []
    for step, batch in enumerate(task.data, 1):
        if step in (1, 5, 30):
            found = judged(task.model, lambda batch=batch: task.loss(task.model, batch), low, 256.0)
            shares.append(found.worst.share)
            assert not found.leaves, (step, found)
            assert found.gradients < 0.2
        if step == 30:
            break
        optimizer.zero_grad()
        task.loss(task.model, batch).backward()
        optimizer.step()
    figure(f"drift of {name} in {low}: at most {max(shares):.2f} of what is explained")


@each_format
@pytest.mark.parametrize("architecture", planted.ARCHITECTURES)
def test_small_networks_stay_within_what_the_format_explains(low: str, architecture: str) -> None:
    for seed in range(10):
        scene = planted.scene(architecture, seed)
        found = judged(scene.model, scene.closure, low)
        assert not found.leaves, (seed, found)


class Spoilt(nn.Module):
    """Something between healthy layers."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, width))
        self.spot = planted.Layer()
        self.spot.change = change
        self.after = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.spot(self.before(x)))


def attention(x: Tensor) -> Tensor:
    return (x @ x.T + 900).softmax(-1) @ x


def accumulated(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(600):
        total += x
    return total


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...], str]] = {
    "a value that overflows": (lambda x: x * 1e4 * 1e4, ("fp16",), "aten::mul"),
    "softmax of large scores": (attention, ("bf16", "fp16"), "aten::_softmax"),
    "a sum of many terms": (accumulated, ("bf16",), "aten::add_"),
    "a difference of near numbers": (lambda x: (x + 3e3) - 3e3, ("bf16", "fp16"), "aten::sub"),
    "a variance by squares": (
        lambda x: ((x + 50) ** 2).mean(-1, keepdim=True) - (x + 50).mean(-1, keepdim=True) ** 2 + 0 * x,
        ("bf16",),
        "",
    ),
    "small values that become zero": (lambda x: x * 1e-6 * 1e-3 * 1e9, ("fp16",), "aten::mul"),
}


@pytest.mark.parametrize(
    ("kind", "low"), [(kind, low) for kind, (_, formats, _) in FAULTS.items() for low in formats]
)
def test_what_the_format_does_not_explain_is_found_where_it_is(kind: str, low: str) -> None:
    change, _, op = FAULTS[kind]
    for seed in range(3):
        torch.manual_seed(seed)
        model, x = Spoilt(change), torch.randn(6, 8)
        found = judged(model, lambda model=model, x=x: model(x).float().square().mean(), low)
        assert found.leaves, found
        assert found.worst.module == "spot", found
        assert found.worst.op.startswith(op), found
        healthy = Spoilt(lambda x: x)
        assert not judged(healthy, lambda model=healthy, x=x: model(x).float().square().mean(), low).leaves


class Parent(nn.Module):
    """Spoils what it gives to a child, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.third(input=(x + 3e3) - 3e3)


def test_a_parent_is_not_mistaken_for_its_child() -> None:
    model = nn.ModuleDict({"inner": Parent()})
    x = torch.randn(4, 8)
    found = judged(model, lambda: model["inner"](x).square().mean(), "bf16")
    assert (found.worst.module, found.worst.op) == ("inner", "aten::sub")
    same = nn.Linear(8, 8)
    found = judged(same, lambda: same((same(x) + 3e3) - 3e3).mean(), "bf16")
    assert found.worst.op == "aten::sub", "what is computed between two calls, outside of the model"


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.4) + torch.randn_like(x) * torch.rand(())
        return self.attention(x, x, x)[0] + self.norm(x) * torch.bernoulli(torch.full_like(x, 0.5))


@each_format
def test_random_numbers_are_the_same_in_both_and_nothing_is_left_behind(low: str) -> None:
    torch.manual_seed(3)
    model, x = Dropping(), torch.randn(12, 16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    found = judged(model, lambda: model(x).square().mean(), low)
    drawn = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), drawn)
    assert not found.leaves, found
    assert found.gradients < 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_draws_within_a_kernel_are_not_judged() -> None:
    lstm = nn.Linear(4, 4)
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    draws = Draws()
    draws.take_down(operator, (None, None, None, 0.0), {}, lstm.weight)
    assert draws.differ == ""
    draws.take_down(operator, (None, None, None, 0.1), {}, lstm.weight)
    assert "_scaled_dot_product_flash_attention draws within its kernel" in draws.differ


class Choosy(nn.Module):
    """Takes another way in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if x.dtype is torch.bfloat16 else x


class Random(Choosy):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + (torch.randn(4) if x.dtype is torch.bfloat16 else torch.randn(1))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Choosy(), "float32 takes another way"),
        (Random(), "aten::randn drew other random numbers in float32"),
        (nn.LayerNorm(4), "nothing ran in a low format"),
    ],
)
def test_what_cannot_be_compared_says_why(model: nn.Module, says: str) -> None:
    off = lambda: fp.autocast("cpu", torch.bfloat16, enabled=isinstance(model, Choosy))  # noqa: E731
    found = drift(model, lambda: model(torch.ones(2, 4)).mean(), off)
    assert isinstance(found, str)
    assert says in found


def test_what_is_computed_outside_of_the_model_alone_is_not_its() -> None:
    norm, head = nn.LayerNorm(4), nn.Linear(4, 4)
    found = drift(norm, lambda: head(norm(torch.ones(2, 4))).mean(), region("bf16"))
    assert found == "no module was given or returned anything that was computed in a low format"


def test_a_plan_is_in_force_in_the_region_and_not_in_float32() -> None:
    torch.manual_seed(0)
    model, x = Spoilt(lambda x: (x + 3e3) - 3e3), torch.randn(6, 8)
    fp.Plan.parse('[default]\nprecision = "bf16"\n').apply(model)
    classes = [type(module) for module in model.modules()]
    found = drift(model, lambda: model(x).mean(), nullcontext)
    assert isinstance(found, Drift)
    assert (found.worst.module, found.worst.op, found.leaves) == ("spot", "aten::sub", True)
    assert [type(module) for module in model.modules()] == classes


def test_torchs_own_regions_are_compared_as_well() -> None:
    torch.manual_seed(0)
    model, x = Spoilt(lambda x: x), torch.randn(6, 8)
    found = drift(model, lambda: model(x).mean(), lambda: torch.autocast("cpu", torch.bfloat16))
    assert isinstance(found, Drift)
    assert 0 < found.worst.share < 1


def test_the_bound_grows_like_the_root_of_the_roundings_up_to_its_own_bound() -> None:
    u = 2.0**-11
    assert explained([]) == 0
    assert explained([u]) == pytest.approx(4 * u, rel=0.01)
    assert explained([u] * 100) == pytest.approx(40 * u, rel=0.02)
    assert explained([2.0**-8, u]) == pytest.approx(4 * math.hypot(2.0**-8, u), rel=0.02)
    assert explained([2.0**-8] * 10**5) == MOST
    assert Distance("a", "", 0.5, 0.25).share == 2


def test_distances_count_what_is_finite_in_float32() -> None:
    inf, nan = math.inf, math.nan
    full = torch.tensor([3.0, inf, nan, 4.0])
    assert distance([torch.tensor([3.0, 1.0, 2.0, 4.5])], [full]) == pytest.approx(0.1)
    assert distance([torch.tensor([3.0, inf, nan, nan])], [full]) == inf
    assert distance([torch.zeros(2)], [torch.zeros(2)]) == 0
    assert distance([torch.ones(2)], [torch.zeros(2)]) == inf
    assert distance([torch.tensor([3e38])], [torch.tensor([-3e38])]) == pytest.approx(2)
