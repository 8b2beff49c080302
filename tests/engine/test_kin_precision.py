"""Kin of what users ran into where float32 is asked for inside of a region, and with parametrized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import floatplan as fp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
each_format = pytest.mark.parametrize("low", [BF16, FP16], ids=str)


def region(low: torch.dtype = BF16) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=UNIFIED)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


# --- 16-bit inputs and float32 weights --------------------------------------------------------------------

MIXED: dict[str, Callable[[torch.dtype], Tensor]] = {
    "convolution": lambda low: F.conv1d(data(1, 4, 8).to(low), data(2, 4, 3), data(2)),
    "transposed convolution": lambda low: F.conv_transpose1d(data(1, 4, 8).to(low), data(4, 2, 3)),
    "batched product": lambda low: torch.bmm(data(2, 4, 4).to(low), data(2, 4, 4) + 1),
    "product and sum": lambda low: torch.addmm(data(4, 4), data(4, 4).to(low), data(4, 4)),
    "product of many": lambda low: torch.einsum("ij,jk,kl->il", data(4, 4).to(low), data(4, 4), data(4, 4)),
    "attention": lambda low: F.scaled_dot_product_attention(
        data(1, 2, 4, 8).to(low), data(1, 2, 4, 8), data(1, 2, 4, 8)
    ),
    "bilinear form": lambda low: F.bilinear(data(4, 4).to(low), data(4, 4), data(3, 4, 4)),
    "solve": lambda low: torch.linalg.solve(data(4, 4) + 8 * torch.eye(4), data(4, 4).to(low)),
}


@pytest.mark.trouble("T74")
@pytest.mark.trouble("T75")
@each_format
@pytest.mark.parametrize("name", MIXED)
def test_low_inputs_meet_float32_ones(name: str, low: torch.dtype) -> None:
    """Where ``enabled=False`` raises, a float32 region takes the inputs up."""
    exact = MIXED[name](FP32)
    for off in (torch.autocast("cpu", enabled=False), fp.autocast("cpu", enabled=False)):
        with region(low), off, pytest.raises(RuntimeError):
            MIXED[name](low)
    for full in (fp.full_precision(), fp.autocast("cpu", dtype=FP32)):
        with region(low), full:
            result = MIXED[name](low)
        assert result.dtype is FP32
        torch.testing.assert_close(result, exact, rtol=0.05, atol=0.05)  # the input was rounded


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


@pytest.mark.trouble("T75")
@each_format
@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_layer_decorated(name: str, low: torch.dtype) -> None:
    layer, x = LAYERS[name](), data(3, 2, 4).to(low)
    inputs = (x, x, x) if name == "attention" else (x,)

    def first(result: Any) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    with region(low), torch.autocast("cpu", enabled=False), pytest.raises((RuntimeError, ValueError)):
        layer(*inputs)
    with region(low):
        up = first(fp.full_precision()(layer)(*inputs))
        back = first(fp.full_precision(cast_outputs=True)(layer)(*inputs))
    assert (up.dtype, back.dtype) == (FP32, low)
    assert torch.equal(up, first(layer(*(tensor.float() for tensor in inputs))))


# --- Differences of near values ---------------------------------------------------------------------------

POINTS, IDENTITY = torch.full((8, 64), 100.0) + torch.linspace(0, 0.1, 64), torch.eye(64)


def slope() -> Tensor:
    """A derivative by finite differences."""
    return ((F.linear(POINTS + 0.05, IDENTITY) - F.linear(POINTS, IDENTITY)) / 0.05).mean()


def spread() -> Tensor:
    """A variance as mean of squares less square of mean."""
    mean = (torch.ones(1, 64) / 64) @ POINTS.T
    return ((torch.ones(1, 64) / 64) @ (POINTS.T**2) - mean**2).mean()


def distances() -> Tensor:
    """Squared distances by products."""
    squares = (POINTS**2).sum(1)
    return (squares[:, None] + squares - 2 * (POINTS @ (POINTS * 1.001).T)).mean()


@pytest.mark.trouble("T99")
@each_format
@pytest.mark.parametrize("function", [slope, spread, distances])
def test_differences_of_near_values_in_a_float32_part(
    function: Callable[[], Tensor], low: torch.dtype
) -> None:
    exact = function()
    with torch.autocast("cpu", dtype=low):
        assert abs(function() - exact) > 0.01 * abs(exact)
    with region(low):
        assert torch.equal(fp.full_precision()(function)(), exact)
        with fp.full_precision():
            assert torch.equal(function(), exact)


# --- Parametrized weights ---------------------------------------------------------------------------------


class Exponential(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(w - w.T)


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "orthogonal, stored in 16 bits": lambda: parametrizations.orthogonal(nn.Linear(8, 8, bias=False)),
    "exponential, stored in 16 bits": lambda: _with(Exponential()),
}


def _with(parametrization: nn.Module) -> nn.Module:
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(data(8, 8))
    parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


@pytest.mark.trouble("T90")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrizations_of_weights_stored_in_16_bits(name: str) -> None:
    torch.manual_seed(0)
    exact = PARAMETRIZED[name]()
    module = PARAMETRIZED[name]()
    module.load_state_dict(exact.state_dict())
    module.to(BF16)
    exact.load_state_dict(module.state_dict())
    with region():
        module(data(4, 8)).float().pow(2).sum().backward()
        weight = module.weight
    torch.testing.assert_close(weight.float(), exact.weight, rtol=1e-2, atol=1e-2)
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    theirs = []
    with torch.autocast("cpu", dtype=BF16):
        try:
            module.zero_grad()
            module(data(4, 8)).float().pow(2).sum().backward()
            theirs.append(all(parameter.grad.isfinite().all() for parameter in module.parameters()))
            theirs.append(torch.allclose(module.weight.float(), exact.weight, rtol=1e-2, atol=1e-2))
        except RuntimeError:
            theirs.append(False)
    assert not all(theirs)
