"""`fp.Amp(..., compile=True)`: the numbers of the eager loop, from a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small import POLICY
from torch import nn

import floatplan as fp
from floatplan import _compiler

X = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def trained(model: nn.Module, precision: Any, compiled: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = fp.Settings(policy=POLICY, float32_outputs=True)
    amp = fp.Amp(model, optimizer, precision, compile=compiled, settings=settings)
    losses = []
    for number, x in enumerate(X):
        with amp.autocast():
            loss = model(x * torch.inf if number == 2 else x).square().mean()
        assert bool(amp.step(loss)) is (number != 2)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_is_the_eager_loop(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compile_calls = _compiler.compile_calls
    monkeypatch.setattr(_compiler, "compile_calls", lambda model: compile_calls(model, backend=backend))
    torch._dynamo.reset()
    model, plain = make(), make()
    assert trained(model, precision, True)[3:] == trained(plain, precision, False)[3:]
    assert len(graphs) == 1
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert copy.deepcopy(model)._compiled_call_impl is None


def test_a_model_that_nobody_compiles_is_left_alone() -> None:
    model = make()
    trained(model, "fp32", False)
    assert model._compiled_call_impl is None
