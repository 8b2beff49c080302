"""``fp.diagnose`` of what is out of the ordinary: integer divisors, masks in the loss, other models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import Mlp, Scene, scene
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp
from floatplan.errors import StepError

INF, NAN = float("inf"), float("nan")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def at_spot(change: Callable[[Tensor], Tensor]) -> fp.Diagnosis:
    of: Scene = scene("mlp")
    of.model.spot.change = change
    return fp.diagnose(of.model, of.closure, precision="bf16")


def of_loss(loss: Callable[[Tensor], Tensor]) -> fp.Diagnosis:
    model = Mlp()
    return fp.diagnose(model, lambda: loss(model(X).float()), precision="bf16")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x: x / torch.zeros(16, dtype=torch.int64), "a division by 0"),
        (lambda x: x / torch.zeros(6, 1, dtype=torch.int32), "a division by 0"),
        (lambda x: x.clone().div_(torch.zeros(6, 1, dtype=torch.int64)), "a division by 0"),
        (lambda x: x + torch.arange(16) / (x * 0), "0/0"),
        (lambda x: x * 0 / 0, "0/0"),
        (lambda x: torch.addcdiv(x, x + 1, x * 0), "a division by 0"),
        (lambda x: x + torch.log(torch.arange(16)), "the logarithm of 0"),
        (lambda x: x + torch.arange(16).rsqrt(), "square root of 0"),
        (lambda x: x + torch.arange(16).reciprocal(), "a division by 0"),
        (lambda x: x + torch.full((16,), 100).exp(), "exp(100)"),
        (lambda x: (x.float() * 0 + 200).exp2(), "exp2(200)"),
        (lambda x: (x.float() * 0 - 200).sinh(), "sinh(200)"),
        (lambda x: torch.xlogy(x * 0 - 1, x * 0), "the logarithm of 0"),
        (lambda x: torch.xlogy(x * 0 + 1, x * 0 - 2), "the logarithm of -2"),
        (lambda x: torch.log1p(x * 0 - 3), "the logarithm of -2"),
        (lambda x: torch.logit(x * 0), "log-odds"),
        (lambda x: (x * 0 + 2).acos(), "it was given 2, and is defined from -1 to 1"),
        (lambda x: torch.complex(x.float(), x.float()).div(x * 0).abs(), "for finite numbers"),
        (lambda x: F.layer_norm(x * 0, (16,), eps=0.0), "an eps of 0"),
        (lambda x: F.group_norm(x * 0, 2, eps=0.0), "an eps of 0"),
        (lambda x: x.float() @ torch.full((16, 16), INF), "of an infinity"),
    ],
)
def test_a_cause_of_the_forward(change: Callable[[Tensor], Tensor], cause: str) -> None:
    found = at_spot(change)
    assert (found.where, found.module) == ("forward", "spot")
    assert cause in found.cause


@pytest.mark.parametrize("weight", [None, torch.zeros(5)])
def test_a_mean_over_no_targets(weight: Tensor | None) -> None:
    target = torch.full((6,), 2 if weight is not None else -100)
    found = of_loss(lambda out: F.cross_entropy(out, target, weight=weight))
    assert (found.where, "the mean of no targets" in found.cause) == ("loss", True)


@pytest.mark.parametrize("way", ["fill_diagonal_", "scatter"])
def test_a_mask_may_be_written_in_any_way(way: str) -> None:
    def hide(x: Tensor) -> Tensor:
        if way == "scatter":
            return x.scatter(1, torch.arange(16).expand(6, 16), -INF).softmax(-1)
        return x[:, :1].clone().fill_diagonal_(-INF).softmax(-1).expand(6, 16)

    found = at_spot(hide)
    assert (found.where, found.module, "mask hides" in found.cause) == ("forward", "spot", True)


def test_float8_is_looked_at() -> None:
    found = at_spot(lambda x: (x * 0 / 0).to(torch.float8_e4m3fn).to(x.dtype) + x)
    assert (found.where, found.module, found.cause) == ("forward", "spot", "0/0")


def test_a_complex_loss_is_refused() -> None:
    with pytest.raises(StepError, match="complex64"):
        of_loss(lambda out: torch.complex(out, out).sum())


def test_a_target_that_ctc_cannot_spell() -> None:
    target, of_input, of_target = torch.tensor([[1] * 5]), torch.tensor([6]), torch.tensor([5])
    found = of_loss(lambda out: F.ctc_loss(out.log_softmax(-1)[:, None], target, of_input, of_target))
    assert (found.where, "longer than its input" in found.cause) == ("loss", True)


def test_a_direction_of_weight_norm_that_is_0() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    with torch.no_grad():
        model.parametrizations.weight.original1[2] = 0  # type: ignore[union-attr, index]
    found = fp.diagnose(model, lambda: model(X).float().sum(), precision="bf16")
    assert (found.where, found.module) == ("forward", "parametrizations.weight.0")
    assert "a direction of weight_norm is 0" in found.cause


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mask_that_reaches_the_loss_is_a_fault(smoothing: float) -> None:
    hidden = torch.eye(6, 5, dtype=torch.bool)
    target = torch.arange(6) % 5
    found = of_loss(
        lambda out: F.cross_entropy(out.masked_fill(hidden, -INF), target, label_smoothing=smoothing)
    )
    assert (found.where, found.module, found.op) == ("loss", "", "aten::masked_fill.Scalar")
    assert "an infinity that aten::masked_fill.Scalar wrote down reached the loss" in found.cause
    assert "finite number" in found.fix


class Named(nn.Module):
    """Takes all by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, *, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer(x) + bias


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("name", ["x", "bias"])
def test_keyword_arguments_of_the_model_are_inputs(bad: float, name: str) -> None:
    model, given = Named(), {"x": X.clone(), "bias": torch.zeros(4)}
    given[name].view(-1)[1] = bad
    found = fp.diagnose(model, lambda: model(**given).float().sum(), precision="bf16")
    assert (found.where, found.module) == ("input", "")
    assert "the arguments of the model of shape" in found.cause


def test_arguments_of_a_criterion_are_not_those_of_the_model() -> None:
    target = torch.zeros(6, 5)
    target[1, 1] = NAN
    found = of_loss(lambda out: nn.MSELoss()(out, target))
    assert (found.where, "the arguments of MSELoss" in found.cause) == ("input", True)


# --- What is left behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("factor", [1.0, NAN])
def test_gradients_of_other_models_and_inputs_stay(precision: str, factor: float) -> None:
    generator, critic, noise = nn.Linear(8, 8), nn.Linear(8, 1), X.clone().requires_grad_()
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    critic.weight.grad = kept = torch.full_like(critic.weight, 7.0)
    fp.diagnose(
        generator,
        lambda: critic(generator(noise)).mean() * factor,
        precision=precision,
        optimizer=optimizer,
    )
    assert critic.weight.grad is kept
    assert bool((kept == 7).all())
    assert critic.bias.grad is None
    assert noise.grad is None
    assert generator.weight.grad is None


def test_a_buffer_that_the_forward_replaces_is_put_back() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean = self.mean * 0.9 + y.detach().float().mean(0)
            return y + self.mean

    model = Average()
    before = model.mean
    for factor in (1.0, NAN):
        fp.diagnose(model, lambda f=factor: model(X).float().sum() * f, precision="bf16")  # type: ignore[misc]
        assert model.mean is before
        assert not bool(before.any())


def test_anomaly_mode_does_not_get_in_the_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            found = at_spot(lambda x: x + (x * 0).sqrt())
            assert torch.is_anomaly_enabled()
    assert (found.where, found.module) == ("backward", "spot")


def test_a_model_of_nested_tensors_is_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested: Any = torch.nested.nested_tensor([X, X[:2]])
        model = nn.Linear(8, 4)
        found = fp.diagnose(
            model, lambda: torch.nested.to_padded_tensor(model(nested), 0.0).float().sum(), precision="bf16"
        )
    assert found.is_healthy
