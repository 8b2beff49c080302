"""Recurrent layers: any mix of dtypes goes in, one dtype comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import floatplan as fp

LOW = (torch.bfloat16, torch.float16)
UNIFIED = fp.Policy.unified(slow_kernels=True)
each_format = pytest.mark.parametrize("low", LOW, ids=str)


def region(low: torch.dtype) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=UNIFIED)


def close(result: Tensor, exact: Tensor, low: torch.dtype, units: float = 16) -> bool:
    error = (result.double() - exact.double()).abs().max() / exact.abs().max()
    return bool(error <= units * torch.finfo(low).eps)


RECURRENT: dict[str, Callable[..., nn.Module]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype}
    return {dtype for item in value for dtype in dtypes(item)} if isinstance(value, (tuple, list)) else set()


def hidden(name: str, dtype: torch.dtype) -> Any:
    state = torch.randn(2, 3, 8).to(dtype)
    return (state, state) if name == "LSTM" else state


@each_format
@pytest.mark.parametrize("given", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("states", [None, torch.float32, "low"], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_take_any_mix(
    name: str, stored: Any, states: Any, given: Any, low: torch.dtype
) -> None:
    """torch.amp raises for an LSTM in fp16, and returns float32 from a GRU."""
    torch.manual_seed(0)
    stored, states, given = (low if dtype == "low" else dtype for dtype in (stored, states, given))
    module = RECURRENT[name](8, 8, 2, batch_first=True).to(stored)
    inputs = torch.randn(3, 5, 8).to(given)
    start = None if states is None else hidden(name, states)
    with region(low):
        result = module(inputs, start)
    assert dtypes(result) == {low}
    module.float()
    lifted = tuple(state.float() for state in start) if isinstance(start, tuple) else start
    exact = module(inputs.float(), lifted.float() if isinstance(lifted, Tensor) else lifted)[0]
    assert close(result[0], exact, low)


@each_format
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_train(name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = RECURRENT[name](8, 8, bidirectional=True), torch.randn(5, 3, 8)
    module(inputs)[0].pow(2).sum().backward()
    exact = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    with region(low):
        loss = module(inputs)[0].pow(2).sum()
    loss.backward()
    for parameter, wanted in zip(module.parameters(), exact, strict=True):
        assert parameter.grad.dtype is torch.float32
        assert close(parameter.grad, wanted, low, 32)


@each_format
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_take_packed_sequences_and_cells_take_a_mix(name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    module, packed = RECURRENT[name](8, 8), pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    cell = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}[name](8, 8)
    state = torch.randn(3, 8)
    with region(low):
        result = module(packed)[0].data
        step = cell(torch.randn(3, 8).to(low), (state, state) if name == "LSTM" else state)
    assert dtypes([result, step]) == {low}
    assert close(result, module(packed)[0].data, low)


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_a_gpu_keep_their_flat_weights(name: str, low: torch.dtype) -> None:
    """Torch's autocast kernel of cuDNN's layers does the casts; a warning would tell of scattered weights."""
    module, inputs = RECURRENT[name](8, 8, 2).cuda(), torch.randn(5, 3, 8, device="cuda")
    with fp.autocast("cuda", dtype=low, policy=UNIFIED):
        result = module(inputs)
    assert dtypes(result) == {low}
    assert close(result[0], module(inputs)[0], low)
