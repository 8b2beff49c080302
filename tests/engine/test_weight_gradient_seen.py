"""Who may see how the gradient of a linear layer's weight comes about gets it from autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from straight_layers import IN, OUT, Pair, all_are_admitted, assert_exact, moved, region
from torch import Tensor, nn
from torch.nn import functional as F

from floatplan import _torch

BF16 = torch.bfloat16

__all__ = ["all_are_admitted"]


def test_autograd_grad_hands_it_out_and_leaves_grad_alone() -> None:
    pair = Pair(4)
    kept = pair.layer.weight.grad = torch.ones(OUT, IN)
    with region():
        y = pair.layer(pair.x)
    of_weight, of_x = torch.autograd.grad(y, [pair.layer.weight, pair.x], pair.g, retain_graph=True)
    assert_exact(of_weight, pair.of_weight)
    torch.autograd.grad(y, pair.x, pair.g, retain_graph=True)
    y.backward(pair.g, inputs=[pair.x], retain_graph=True)
    assert pair.x.grad is not None
    assert torch.equal(pair.x.grad, of_x)
    assert torch.equal(kept, torch.ones(OUT, IN))
    y.backward(pair.g, inputs=[pair.layer.weight])
    assert_exact(kept, pair.of_weight + 1)


HOOKS: dict[str, Callable[[nn.Parameter, list[Any]], Any]] = {
    "tensor": lambda w, seen: w.register_hook(lambda g: (seen.append(g), g * 2)[1]),
    "post-accumulate": lambda w, seen: w.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.mul_(2))
    ),
    "before the node": lambda w, seen: node(w).register_prehook(
        lambda gs: (seen.append(gs[0]), (gs[0] * 2,))[1]
    ),
    "after the node": lambda w, seen: node(w).register_hook(
        lambda _, gs: (seen.append(gs[0]), w.grad.mul_(2))[0]
    ),
}


def node(w: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(w).node


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_see_it(kind: str) -> None:
    pair = Pair(4)
    with region():
        y = pair.layer(pair.x)
    seen: list[Any] = []
    HOOKS[kind](pair.layer.weight, seen)
    pair.layer.weight.grad = torch.zeros(OUT, IN)
    y.backward(pair.g)
    assert_exact(pair.weight_grad, 2 * pair.of_weight)
    assert [type(g) for g in seen] == [Tensor]


def test_a_hook_that_was_there_and_has_gone_hinders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.run()
    with region():
        y = pair.layer(pair.x)
    node(pair.layer.weight).register_prehook(lambda _: None).remove()
    with moved({"addmm_": 1}, monkeypatch):
        y.backward(pair.g)


WATCHED: dict[str, tuple[str, Any]] = {
    "another thread": ("other_threads", 1),
    "other ranks": ("has_process_group", True),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_autograd_adds_it_where_others_take_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.run()
    name, value = WATCHED[kind]
    monkeypatch.setattr(_torch, name, lambda: value)
    with region():
        y = pair.layer(pair.x)
    with moved({"mm": 1, "add_": 1}, monkeypatch):
        y.backward(pair.g)
    assert_exact(pair.weight_grad, 2 * pair.of_weight)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomaly_detection_sees_a_nan_before_it_is_added() -> None:
    pair = Pair(4)
    pair.x.requires_grad_(False)
    kept = pair.layer.weight.grad = torch.zeros(OUT, IN)
    with torch.autograd.detect_anomaly(), region():
        y = pair.layer(pair.x)
        pair.g[0, 0] = torch.nan
        with pytest.raises(RuntimeError, match="returned nan values"):
            y.backward(pair.g)
    assert not kept.any()


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", dtype=BF16), region])
def test_a_region_around_the_backward_changes_nothing(around: Callable[[], Any]) -> None:
    pair = Pair(4)
    for count in (1, 2):
        with region():
            y = pair.layer(pair.x)
        with around():
            y.backward(pair.g)
            assert torch.is_autocast_enabled("cpu")
        assert_exact(pair.weight_grad, count * pair.of_weight)


def test_a_backward_with_a_graph() -> None:
    """Against the program of operators that autograd differentiates by itself."""
    pair = Pair(4)
    pair.layer.weight.grad = torch.ones(OUT, IN)

    def penalty(straight: bool) -> list[Tensor]:
        pair.layer.weight.grad = torch.ones(OUT, IN)
        w, b = pair.layer.weight, pair.layer.bias
        with region():
            y = pair.layer(pair.x) if straight else F.linear(pair.x, w.bfloat16(), b.bfloat16())
        inputs = [pair.x, w, b]
        first = torch.autograd.grad(y.float().tanh().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.float().pow(2).sum() for g in first), inputs))

    for found, plain in zip(penalty(True), penalty(False), strict=True):
        assert found.dtype is plain.dtype
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.5)
    assert pair.layer.weight.grad is not None
    assert torch.equal(pair.layer.weight.grad, torch.ones(OUT, IN))


@pytest.mark.parametrize("filled", [False, True])
def test_a_backward_that_is_compiled(filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written where torch's compiled autograd traces, and hooks and ``.grad`` are its own."""
    asked = []
    monkeypatch.setattr(_torch, "has_hooks", lambda node: bool(asked.append(node)))
    pair = Pair(4)
    pair.layer.weight.grad = torch.ones(OUT, IN) if filled else None
    with region():
        y = pair.layer(pair.x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(pair.g)
    assert_exact(pair.weight_grad, pair.of_weight + float(filled))
    assert not asked
