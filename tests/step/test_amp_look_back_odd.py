"""Looks at steps of models and loops of kinds that they were not written for."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import floatplan as fp

POLICY = fp.Policy.unified(slow_kernels=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.first(x)))


def batch(number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def train(
    model: nn.Module,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    *,
    bad: tuple[int, ...] = (1, 2),
    steps: int = 5,
    looks: bool = True,
) -> tuple[list[fp.StepResult], fp.Amp]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = fp.Settings(policy=POLICY, init_scale=16.0, diagnose=looks, diagnose_after=2)
    amp = fp.Amp(model, optimizer, "bf16", settings=settings)
    results = []
    for number in range(steps):
        with amp.autocast():
            loss = call(model, batch(number)).float().square().mean()
            loss = loss * (torch.nan if number in bad else 1.0)
        results.append(amp.step(loss))
    return results, amp


def found_in(results: list[fp.StepResult]) -> list[fp.Diagnosis]:
    return [result.diagnosis for result in results if result.diagnosis is not None]


# --- What a look leaves behind --------------------------------------------------------------------------


class Keeps(Net):
    """Has a state beside parameters and buffers: everything that it returns depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.by_name = 0, [0], {"n": (torch.zeros(3),)}
        self.hidden = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy, self.python = numpy.random.default_rng(3), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by_name["n"][0].add_(1)
        self.hidden = self.hidden + 1
        self.late = len(self.seen)
        drawn = torch.rand(3, generator=self.generator) + self.numpy.normal() + self.python.random()
        state = self.hidden + self.by_name["n"][0] + self.late + self.calls
        return super().forward(x) + 0.1 * (state + drawn)  # type: ignore[no-any-return]


class Writes(Net):
    """Writes to its weights in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.mul_(0.9)
        self.last.weight.data = self.last.weight.data * 0.9
        with torch.no_grad():
            self.last.bias.mul_(0.9)
        return super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Keeps, Writes])
def test_what_a_forward_writes_to_is_put_back(make: Callable[[], nn.Module]) -> None:
    seen, plain = make(), make()
    results, _ = train(seen)
    others, _ = train(plain, looks=False)
    assert found_in(results)
    assert all(map(torch.equal, seen.parameters(), plain.parameters()))
    assert [result.grad_norm for result in results[3:]] == [result.grad_norm for result in others[3:]]
    assert set(vars(seen)) == set(vars(plain))


def test_hooks_that_act_on_a_gradient_do_not_run() -> None:
    model, acted = Net(), []
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: acted.append(parameter))
    results, amp = train(model)
    assert found_in(results)
    amp.diagnose()
    assert len(acted) == 5
    assert model.first.weight._post_accumulate_grad_hooks


def test_a_weight_that_a_model_returns_keeps_no_hook() -> None:
    class Returns(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.last.weight

    model = Returns()
    results, _ = train(model, lambda model, x: model(x)[0] + model(x)[1].sum(), steps=3)
    assert found_in(results)
    assert not model.last.weight._backward_hooks


@dataclasses.dataclass
class Arguments:
    x: Tensor
    said: str = ""


def test_arguments_of_dataclasses_are_written_to_once() -> None:
    class Takes(Net):
        def forward(self, given: Arguments) -> Tensor:
            given.x.add_(1.0)
            given.said += "x"
            return super().forward(given.x)  # type: ignore[no-any-return]

    kept: list[Arguments] = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(Arguments(x))
        return model(kept[-1])  # type: ignore[no-any-return]

    results, _ = train(Takes(), call)
    assert found_in(results)
    for number, given in enumerate(kept):
        assert torch.equal(given.x, batch(number) + 1.0)
        assert given.said == "x"


def test_copies_and_files_of_a_model_in_a_region() -> None:
    model = Net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with amp.autocast():
        loss = model(batch(0)).float().sum()
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            other(batch(1) * torch.nan)
    amp.step(loss)
    assert amp.diagnose().is_healthy


# --- What is given and returned -------------------------------------------------------------------------


def test_what_a_backward_does_not_reach_has_no_gradient() -> None:
    class Chunks(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).chunk(3, -1)

    results, _ = train(Chunks(), lambda model, x: model(x)[0])
    assert len(found_in(results)) == 1


def test_arguments_of_inference_mode() -> None:
    with torch.inference_mode():
        inputs = torch.ones(4, 6)
    results, _ = train(Net(), lambda model, x: model(inputs * 1.0))
    assert found_in(results)

    class Copies(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.clone())

    results, _ = train(Copies(), lambda model, x: model(inputs))
    assert found_in(results)


@pytest.mark.parametrize("kind", ["complex", "sparse", "nested"])
def test_outputs_of_other_kinds(kind: str) -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x).float()
            if kind == "complex":
                return torch.complex(y, y).conj()
            return (
                y.to_sparse() if kind == "sparse" else torch.nested.as_nested_tensor(y, layout=torch.jagged)
            )

    def call(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.real if kind == "complex" else y.to_dense() if kind == "sparse" else y.values()

    (found,) = found_in(train(Other(), call)[0])
    assert (found.where, found.is_healthy) == ("loss", False)
    assert "all that the model returned is finite" in found.cause


@pytest.mark.parametrize("kind", ["iterator", "dataclass"])
def test_what_cannot_be_looked_at_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Net):
        def forward(self, given: Any) -> Any:
            if kind == "iterator":
                return super().forward(sum(given))
            return Arguments(super().forward(given))

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(iter([x, x])) if kind == "iterator" else model(x).x

    with caplog.at_level(logging.WARNING, "floatplan"):
        results, _ = train(Reads(), call)
    assert not found_in(results)
    said = "can be read only once" if kind == "iterator" else "returned no tensor of floating-point numbers"
    assert said in caplog.text


# --- Which loss it was ----------------------------------------------------------------------------------


def test_a_loss_that_was_thrown_away_is_of_no_later_step() -> None:
    model = Net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.05), "bf16")
    with amp.autocast():
        loss = model(batch(0)).float().sum() * torch.nan
    amp.backward(loss)
    assert amp.diagnose().where == "loss"
    amp.skip()
    with amp.autocast():
        model(batch(1))
    assert amp.diagnose().is_healthy


def test_losses_of_optimizers_in_turn() -> None:
    models = Net(), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = fp.Amp(models, optimizers, "bf16")
    with amp.autocast():
        outputs = models[0](batch(0))
        losses = models[1](outputs).float().sum() * torch.nan, models[1](outputs.detach()).float().sum()
    for loss, optimizer in zip(losses, optimizers, strict=True):
        amp.backward(loss, optimizer=optimizer, retain_graph=True)
    assert amp.step(optimizer=optimizers[1])
    found = amp.step(optimizer=optimizers[0]).diagnosis
    assert found is not None
    assert (found.is_healthy, found.where) == (False, "loss")
