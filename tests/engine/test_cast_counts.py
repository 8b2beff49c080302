"""How often a training step casts, in the models of the benchmarks: never more than torch.amp."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp
from floatplan import _torch
from floatplan.engine import cache, weight_gradient
from floatplan.engine.capability import StraightLimits

BF16, FP32 = torch.bfloat16, torch.float32
FOLDER = Path(__file__).parents[2] / "benchmarks"
WORKLOADS = runpy.run_path(str(FOLDER / "workloads.py"))["WORKLOADS"]
UNIFIED = fp.Policy.unified(slow_kernels=True)


@pytest.fixture(autouse=True)
def as_with_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are those of a CPU that multiplies bf16, whichever runs the tests."""
    monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(rows=32, elements=2**20))
    fp.cast_cache().clear()


class Count(NamedTuple):
    """Casts between formats and the elements that they made."""

    casts: int
    elements: int

    def __repr__(self) -> str:
        return f"Count({self.casts}, {self.elements})"


def count(run: Callable[[], object]) -> Count:
    made: list[int] = []

    def tell(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = op.overloadpacket.__name__
        if name == "_to_copy" and args[0].is_floating_point() and args[0].dtype is not result.dtype:
            made.append(result.numel())
        elif name == "copy_" and args[1].is_floating_point() and args[0].dtype is not args[1].dtype:
            made.append(args[0].numel())

    with _torch.Watch(tell):
        run()
    return Count(len(made), sum(made))


def of_step(name: str, region: Callable[[], Any]) -> tuple[Count, Count]:
    """Of the forward and of the backward of a small workload's second step, which has gradients to add to."""
    work = WORKLOADS[name](small=True, device="cpu")
    model, (x, y) = work.model(), work.batches()[0]
    losses: list[Tensor] = []

    def forward() -> None:
        with region(), torch.set_grad_enabled(work.trains):
            losses.append(work.loss(model, x, y) if work.trains else model(x))

    def backward() -> None:
        if work.trains:
            losses[-1].backward()

    forward()
    backward()
    return count(forward), count(backward)


def ours() -> fp.autocast:
    return fp.autocast("cpu", dtype=BF16, policy=UNIFIED)


def torchs() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


# Forward: each weight and bias, each float32 input, the logits for the loss. Backward: the same, back.
COUNTS: dict[str, tuple[Count, Count]] = {
    # 1 input, 5 weights, 5 biases, 1 logits
    "tiny-mlp": (Count(12, 19658), Count(11, 17610)),
    "accumulation": (Count(12, 267866), Count(11, 265818)),
    # 1 input, 3 convolutions, 1 weight, 1 bias, 1 logits; nothing around batch norms and the pool
    "cnn": (Count(7, 36570), Count(6, 24282)),
    # 2 look-ups, 13 weights, 13 biases, 1 logits; nothing around norms, attention and the stream
    "gpt": (Count(29, 545824), Count(29, 545824)),
    # 1 input, 2 states, 8 weights and biases of the layers, 2 of the head, 1 logits. The recurrent kernel
    # of oneDNN returns 9 gradients in float32, which autograd takes to bf16 and back.
    "lstm": (Count(14, 59098), Count(20, 117466)),
    # as of the convolutions, with a weight and a bias more; back only those of the head
    "frozen": (Count(9, 45530), Count(5, 9770)),
    # as of the transformer, with 24 weights of adapters, which alone have gradients
    "finetune": (Count(53, 582688), Count(25, 167936)),
    # 1 input, 5 weights, 5 biases
    "evaluation": (Count(11, 267786), Count(0, 0)),
}


@pytest.mark.trouble("T105")
@pytest.mark.trouble("T107")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", COUNTS)
def test_casts_of_a_step(name: str) -> None:
    found = of_step(name, ours)
    assert found == COUNTS[name]
    for mine, theirs in zip(found, of_step(name, torchs), strict=True):
        assert mine.casts <= theirs.casts
        assert mine.elements <= theirs.elements


def test_every_model_of_the_benchmarks_is_counted() -> None:
    # The wide perceptron differs from the tiny one in its sizes alone.
    assert set(COUNTS) == set(WORKLOADS) - {"wide-mlp"}


@pytest.mark.trouble("T105")
def test_an_activation_that_several_layers_take_is_cast_once() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    x = torch.randn(cache.SHARE_FROM // 64, 64, requires_grad=True) * 1

    def use(region: Callable[[], Any]) -> Count:
        with region():
            return count(lambda: [layer(x) for layer in layers])

    assert use(ours).casts == 3 + 1
    assert use(torchs).casts == 3 + 3


@pytest.mark.trouble("T107")
def test_a_residual_stream_is_not_cast_between_its_blocks() -> None:
    """Nor its gradient: what casts is the look-up before and the loss behind."""
    table, norm, layer = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
    words = torch.arange(16)
    outputs = []

    def forward() -> None:
        with ours():
            x = table(words)
            for _ in range(3):
                x = x + F.gelu(layer(norm(x)))
            assert x.dtype is BF16
            outputs.append(x.float().square().sum())

    with ours():
        layer(norm(table(words)))
    assert count(forward).casts == 1 + 3 + 1  # the layer is small, so it is cast for each use
    assert count(outputs[-1].backward).casts == 1 + 3 + 1


@pytest.mark.trouble("T105")
def test_a_weight_of_few_rows_has_no_cast_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input and gradient are cast, which is 16 rows, and not a gradient of the weight's size."""
    monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(rows=32, elements=2**14))
    layer, x = nn.Linear(128, 128), torch.randn(16, 128)
    with ours():
        y = layer(x)
    gradient = torch.ones_like(y)
    assert count(lambda: y.backward(gradient)) == Count(2, 2 * 16 * 128)
