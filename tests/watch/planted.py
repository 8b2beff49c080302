"""Faults planted into four small networks, with the module and the place that a diagnosis should name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5


class Layer(nn.Module):
    """Something between two layers, which a fault can replace; returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


class Mlp(nn.Module):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.spot, self.head = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            Layer(),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.spot(F.gelu(self.middle(F.gelu(self.first(x))))))

    def batch(self) -> Tensor:
        return torch.randn(6, 8)


class Cnn(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle, self.spot, self.head = nn.Conv2d(4, 4, 3, padding=1), Layer(), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(self.spot(F.relu(self.middle(x))).mean((2, 3)))

    def batch(self) -> Tensor:
        return torch.randn(6, 2, 6, 6)


class Attention(nn.Module):
    """Attention written out, so that its scores are values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q * self.factor) @ k.transpose(-1, -2) * 8**-0.5
        return self.out(scores.softmax(-1) @ v)


class Transformer(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.attention = nn.Embedding(11, 8), nn.LayerNorm(8), Attention()
        self.middle, self.spot, self.head = nn.Linear(8, 8), Layer(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(self.norm(x))
        return self.head(self.spot(x + self.middle(x)).mean(1))

    def batch(self) -> Tensor:
        return torch.randint(11, (6, 7))


class Lstm(nn.Module):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 8)
        self.spot, self.head = Layer(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.spot(self.middle(self.first(x)[0][:, -1])))

    def batch(self) -> Tensor:
        return torch.randn(6, 5, 4)


ARCHITECTURES: dict[str, type[nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer, "lstm": Lstm}


@dataclass
class Scene:
    """A network, its batch and its loss, before or after a fault was planted."""

    model: Any
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = field(default=lambda logits, y: F.cross_entropy(logits, y))

    def closure(self) -> Tensor:
        return self.loss(self.model(self.x), self.y)


def scene(architecture: str, seed: int = 0) -> Scene:
    torch.manual_seed(seed)
    model: Any = ARCHITECTURES[architecture]()
    return Scene(model, model.batch(), torch.randint(CLASSES, (6,)))


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        plant: changes a scene.
        module: the name that is right; "?" for any.
        where: what is right.
        cause: words that the cause must have, one of them.
        precisions: in which it is one.
        architectures: in which it can be planted.
    """

    plant: Callable[[Scene], None]
    module: str
    where: str
    cause: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp16", "bf16")
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class _InfiniteValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _set(parameter: Tensor, value: float) -> None:
    with torch.no_grad():
        parameter.view(-1)[0] = value


def _scaled(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def _spot(change: Callable[[Tensor], Tensor]) -> Callable[[Scene], None]:
    def plant(of: Scene) -> None:
        of.model.spot.change = change

    return plant


def _loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scene], None]:
    def plant(of: Scene) -> None:
        of.loss = loss

    return plant


def _huge_layer(of: Scene) -> None:
    factor = 1e7 if of.model.middle.weight.dim() > 1 else 1.0
    _scaled(of.model.middle, factor)


def _huge_layer_beyond_float32(of: Scene) -> None:
    _scaled(of.model.middle, 1e25)
    _scaled(of.model.head, 1e25)


def _huge_scores(of: Scene) -> None:
    _scaled(of.model.attention.qkv, 60.0)
    of.model.attention.factor = 500.0


def _bad_input(value: float) -> Callable[[Scene], None]:
    def plant(of: Scene) -> None:
        of.x.view(-1)[3] = value

    return plant


def _bad_variance(of: Scene) -> None:
    of.model.eval()
    of.model.norm.running_var[1] = -2.0


def _bad_mean(of: Scene) -> None:
    of.model.eval()
    of.model.norm.running_mean[1] = float("nan")


def _target(of: Scene) -> None:
    of.y[2] = CLASSES + 3


def _diverge(of: Scene) -> None:
    optimizer = torch.optim.SGD(of.model.parameters(), lr=1e15)
    for _ in range(4):
        optimizer.zero_grad()
        loss = of.closure()
        if not torch.isfinite(loss):
            return
        before = [parameter.detach().clone() for parameter in of.model.parameters()]
        loss.backward()
        optimizer.step()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in of.model.parameters()):
            with torch.no_grad():
                for parameter, old in zip(of.model.parameters(), before, strict=True):
                    parameter.copy_(old)
            return


def _hidden_row(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[0] = True
    return x.masked_fill(mask, float("-inf")).softmax(-1)


FAULTS: dict[str, Fault] = {
    "forward overflow in a layer": Fault(_huge_layer, "middle", "forward", ("overflow",), ("fp16",)),
    "activation overflow": Fault(
        _spot(lambda x: (x * 0 + 300) * (x * 0 + 300)),
        "spot",
        "forward",
        ("overflow",),
        ("fp16",),
    ),
    "overflow in attention scores": Fault(
        _huge_scores, "attention", "forward", ("overflow",), ("fp16",), ("transformer",)
    ),
    "overflow beyond float32": Fault(_huge_layer_beyond_float32, "head", "forward", ("overflow",), ("bf16",)),
    "NaN in one weight": Fault(
        lambda of: _set(of.model.middle.weight, float("nan")), "middle", "weight", ("NaN",)
    ),
    "inf in one bias": Fault(lambda of: _set(of.model.head.bias, float("inf")), "head", "weight", ("inf",)),
    "NaN in the batch": Fault(
        _bad_input(float("nan")), "", "input", ("NaN",), architectures=("mlp", "cnn", "lstm")
    ),
    "inf in the batch": Fault(
        _bad_input(float("inf")), "", "input", ("inf",), architectures=("mlp", "cnn", "lstm")
    ),
    "log(0) in the loss": Fault(
        _loss(lambda out, y: -(out.softmax(-1) * 0).log().mean()), "", "loss", ("logarithm of 0",)
    ),
    "log of a negative number": Fault(
        _loss(lambda out, y: (-(out**2) - 1).log().mean()), "", "loss", ("logarithm of -",)
    ),
    "0/0 in a normalisation": Fault(
        _spot(lambda x: (x - x.detach()) / (x - x.detach()).abs().amax()), "spot", "forward", ("0/0",)
    ),
    "square root below zero": Fault(
        _spot(lambda x: (-(x**2) - 1).sqrt()), "spot", "forward", ("square root",)
    ),
    "exp of a large number": Fault(
        _spot(lambda x: (x.float() * 0 + 200).exp()), "spot", "forward", ("exp(200)",)
    ),
    "a row that a mask hides": Fault(_spot(_hidden_row), "spot", "forward", ("mask hides",)),
    "slope of sqrt at 0": Fault(
        _spot(lambda x: x + (x * 0).abs().sqrt()), "spot", "backward", ("sqrt at 0",)
    ),
    "slope of a norm at 0": Fault(
        _spot(lambda x: x + (x - x.detach()).div(1.0).pow(2).sum(-1, keepdim=True).sqrt()),
        "spot",
        "backward",
        ("sqrt at 0",),
    ),
    "overflow only in backward": Fault(
        _spot(lambda x: (x.float() * 1e-30) * 1e30 * 1e4 * 1e-4 + _Steep.apply(x)),
        "spot",
        "backward",
        ("overflow",),
    ),
    "custom backward returns inf": Fault(_spot(_InfiniteGradient.apply), "spot", "backward", ("inf",)),
    "custom forward returns inf": Fault(
        _spot(_InfiniteValue.apply), "spot", "forward", ("division by 0", "0/0")
    ),
    "underflow of all gradients": Fault(
        _loss(lambda out, y: F.cross_entropy(out, y) * 1e-25), "", "backward", ("underflow",), ("fp16",)
    ),
    "a bad running variance": Fault(_bad_variance, "norm", "weight", ("variance",), architectures=("cnn",)),
    "a bad running mean": Fault(_bad_mean, "norm", "weight", ("NaN",), architectures=("cnn",)),
    "a learning rate too high": Fault(_diverge, "?", "forward", ("overflow",), ("bf16",)),
    "targets out of range": Fault(_target, "", "input", ("target is 8",)),
}


class _Steep(torch.autograd.Function):
    """Adds nothing, and has a slope that no format holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ((gradient.float() + 1) * 3e38 * 3e38).to(gradient.dtype)


def combinations() -> list[tuple[str, str, str]]:
    """(fault, architecture, precision)."""
    return [
        (name, architecture, precision)
        for name, fault in FAULTS.items()
        for architecture in fault.architectures
        for precision in fault.precisions
    ]
