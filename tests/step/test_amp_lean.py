"""What a step of an Amp does not cost: kernels that tell nothing new, regions with nothing to keep out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import floatplan as fp

BF16 = torch.bfloat16


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


class Kernels(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def backward(amp: fp.Amp, model: nn.Module) -> None:
    with amp.autocast():
        loss = model(torch.ones(3, 8)).square().mean()
    amp.backward(loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_the_backward_a_step_runs_the_norm_and_the_update(precision: Any) -> None:
    model = make()
    amp = fp.Amp(model, torch.optim.AdamW(model.parameters(), fused=True), precision)
    for _ in range(2):
        backward(amp, model)
        assert amp.step()
    backward(amp, model)
    with Kernels() as kernels:
        result = amp.step(clip_norm=1e6)
    views = kernels.seen.pop("view", 0) + kernels.seen.pop("reshape", 0)
    assert views <= 4  # one per parameter
    assert kernels.seen == Counter(["cat", "dot", "_local_scalar_dense", "_fused_sgd_", "_fused_adamw_"])
    with Kernels() as kernels:
        assert result.stepped
        assert math.isfinite(result.grad_norm)
    assert not kernels.seen


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [True, None])
def test_it_steps_as_the_plain_loop(make_optimizer: Callable[..., Any], fused: bool | None) -> None:
    model, plain = make(), make()
    optimizer = make_optimizer(model.parameters(), lr=0.1, fused=fused)
    theirs = make_optimizer(plain.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other = torch.optim.lr_scheduler.StepLR(theirs, 2)
    amp = fp.Amp(model, optimizer, "fp32")
    for _ in range(5):
        backward(amp, model)
        assert amp.step(scheduler=scheduler)
        theirs.zero_grad()
        plain(torch.ones(3, 8)).square().mean().backward()
        theirs.step()
        other.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert str(optimizer.state_dict()) == str(theirs.state_dict())


def gradients(how: str) -> list[Tensor]:
    torch.manual_seed(1)
    sizes = {"many": [7] * 100, "large": [300_000, 9_000], "mixed": [1, 5_000, 40, 70_000, 4096] * 8}[how]
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("factor", [1.0, 1e-24, 1e15])
@pytest.mark.parametrize("how", ["many", "large", "mixed"])
def test_the_norm_is_right(how: str, factor: float) -> None:
    model = nn.ParameterList([torch.zeros_like(grad) for grad in gradients(how)])
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32")
    values = [grad * factor for grad in gradients(how)]
    amp.backward(torch.stack([(p * v).sum() for p, v in zip(model, values, strict=True)]).sum())
    exact = math.hypot(*(value.double().norm().item() for value in values))
    assert amp.step().grad_norm == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 3, 31, 32, 39])
def test_no_value_that_is_not_finite_hides_among_many(place: int, bad: float) -> None:
    model = nn.ParameterList([torch.zeros_like(grad) for grad in gradients("mixed")])
    amp = fp.Amp(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    values = gradients("mixed")
    values[place][-1] = bad
    amp.backward(torch.stack([p.sum() for p in model]).sum())
    amp.unscale()
    for parameter, value in zip(model, values, strict=True):
        parameter.grad.copy_(value)
    result = amp.step()
    assert result.culprit == str(place)
    assert not any(p.any() for p in model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_region_of_a_forward(precision: Any) -> None:
    model = make()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters()), precision)
    inside = None if precision == "fp32" else BF16

    @amp.autocast()
    def in_region() -> Any:
        return fp.current_precision("cpu")

    assert in_region() is in_region() is inside
    region = amp.autocast()
    with region, region:
        assert fp.current_precision("cpu") is inside
    with fp.autocast("cpu", torch.float16, policy="torch"):
        with region:
            assert fp.current_precision("cpu") is inside
            with torch.autocast("cpu", BF16), region:
                assert fp.current_precision("cpu") is inside
            assert fp.current_precision("cpu") is inside
        assert fp.current_precision("cpu") is torch.float16
    assert fp.current_precision("cpu") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_region_in_a_function_that_is_one_graph(precision: Any) -> None:
    model = make()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)

    def loss_of(x: Tensor) -> Tensor:
        with amp.autocast():
            return model(x).float().square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, 8)
    for _ in range(2):
        loss = compiled(x)
        assert torch.equal(loss, loss_of(x))
        assert amp.step(loss)
