"""The gradient of a linear layer's weight as a float32 product, added where it belongs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from straight_layers import IN, OUT, UNIFIED, Pair, all_are_admitted, assert_exact, moved, region
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan import _torch
from floatplan.engine import cache, state, weight_gradient
from floatplan.engine.capability import Capability, StraightLimits, straight_limits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

__all__ = ["all_are_admitted"]


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 5), (2, 3, 4)])
def test_it_is_the_float32_product_of_the_16_bit_operands(
    rows: tuple[int, ...], bias: bool, low: torch.dtype
) -> None:
    pair = Pair(*rows, low=low, bias=bias)
    y = pair.run()
    weight = pair.layer.weight.detach().to(low)
    assert y.dtype is low
    assert torch.equal(y, F.linear(pair.x, weight, pair.layer.bias.to(low) if bias else None))
    assert_exact(pair.weight_grad, pair.of_weight)
    assert pair.x.grad is not None
    assert pair.x.grad.dtype is low
    torch.testing.assert_close(pair.x.grad, (pair.g.double() @ weight.double()).to(low))
    if bias:
        assert_exact(pair.layer.bias.grad, pair.g.double().reshape(-1, OUT).sum(0))


def test_the_first_gradient_is_the_product_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    with region():
        y = pair.layer(pair.x)
    with moved({"mm": 1}, monkeypatch):
        y.backward(pair.g)
    assert_exact(pair.weight_grad, pair.of_weight)


def test_later_ones_are_added_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.run()
    gradient, version = pair.weight_grad, pair.weight_grad._version
    with region():
        y = pair.layer(pair.x)
    with moved({"addmm_": 1}, monkeypatch):
        y.backward(pair.g)
    assert pair.weight_grad is gradient
    assert gradient._version > version  # who marks gradients sees it
    assert_exact(gradient, 2 * pair.of_weight)


def test_micro_batches_and_none_between() -> None:
    pair = Pair(4)
    for count in (1, 2, 3):
        pair.run()
        assert_exact(pair.weight_grad, count * pair.of_weight)
    pair.layer.weight.grad = None
    pair.run()
    assert_exact(pair.weight_grad, pair.of_weight)
    pair.layer.zero_grad(set_to_none=False)
    pair.run()
    assert_exact(pair.weight_grad, pair.of_weight)


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "view of a flat buffer": lambda: torch.zeros(2, OUT, IN)[1],
    "part of a wider one": lambda: torch.zeros(OUT, 2 * IN)[:, IN:],
    "transposed": lambda: torch.zeros(IN, OUT).T,
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_is_a_view_stays_one(kind: str) -> None:
    pair = Pair(4)
    view = pair.layer.weight.grad = GRADIENTS[kind]()
    assert view._base is not None
    pair.run()
    assert pair.weight_grad is view
    assert_exact(view, pair.of_weight)
    torch.testing.assert_close(view._base.sum().double(), pair.of_weight.sum(), rtol=1e-4, atol=1e-4)


def test_a_gradient_with_a_graph_is_not_written_to() -> None:
    pair = Pair(4)
    leaf = torch.zeros(OUT, IN, requires_grad=True)
    pair.layer.weight.grad = leaf * 1
    pair.run()
    assert_exact(pair.weight_grad.detach(), pair.of_weight)


def test_a_graph_that_is_retained_gives_it_again() -> None:
    pair = Pair(4)
    y = pair.run(retain_graph=True)
    y.backward(pair.g)
    assert_exact(pair.weight_grad, 2 * pair.of_weight)


@pytest.mark.parametrize("filled", [False, True])
def test_uses_of_a_tied_weight_add_up(filled: bool) -> None:
    """Twice in a linear layer, once in a product of another kind and once in a look-up."""
    w = nn.Parameter(torch.randn(OUT, IN))
    w.grad = torch.ones(OUT, IN) if filled else None
    a, b, words = torch.randn(3, IN).bfloat16(), torch.randn(5, IN).bfloat16(), torch.tensor([1, 1, 4])
    g_a, g_b = torch.randn(3, OUT).bfloat16(), torch.randn(5, OUT).bfloat16()
    with region():
        first, second = F.linear(a, w), F.linear(b, w)
        other, looked_up = torch.matmul(a, w.t()), F.embedding(words, w)
    torch.autograd.backward(
        [first, second, other, looked_up], [g_a, g_b, torch.ones_like(other), torch.ones_like(looked_up)]
    )
    of_words = F.one_hot(words, OUT).double().T @ torch.ones(3, IN).double()
    exact = g_a.double().T @ a.double() + g_b.double().T @ b.double() + of_words + float(filled)
    rounded = torch.ones(3, OUT).bfloat16().T @ a  # that of the other product is a 16-bit one
    assert_exact(w.grad, exact + rounded.double())


def test_a_sparse_gradient_of_a_tied_table() -> None:
    w = nn.Parameter(torch.randn(OUT, IN))
    x, g = torch.randn(3, IN).bfloat16(), torch.randn(3, OUT).bfloat16()
    F.embedding(torch.tensor([2, 2]), w, sparse=True).sum().backward()
    assert w.grad is not None
    assert w.grad.is_sparse
    with region():
        y = F.linear(x, w)
    y.backward(g)
    exact = g.double().T @ x.double()
    exact[2] += 2
    assert_exact(w.grad, exact)


@pytest.mark.parametrize("rows", [(4,), (2, 3)])
def test_what_follows_may_write_to_the_result(rows: tuple[int, ...]) -> None:
    pair = Pair(*rows)
    with region():
        y = pair.layer(pair.x)
        signs = y.detach() > 0
        y.relu_().backward(pair.g)
    pair.g *= signs
    assert_exact(pair.weight_grad, pair.of_weight)


@pytest.mark.trouble("T38")
def test_many_uses_add_up_in_float32() -> None:
    w = nn.Parameter(torch.ones(1, 1))
    one = torch.ones(1, 1, dtype=BF16)
    for _ in range(2):
        with region():
            total = sum((F.linear(one, w).float() for _ in range(512)), torch.zeros(1, 1))
        total.backward()
    assert w.grad is not None
    assert w.grad.item() == 1024.0


@pytest.mark.trouble("T115")
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_checkpointing(reentrant: bool, outside: bool, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_used", {"cpu": [UNIFIED]})  # as in a process that uses one policy
    pair = Pair(4)

    def forward(x: Tensor) -> Tensor:
        if outside:
            return torch.tanh(pair.layer(x))
        with region():
            return torch.tanh(pair.layer(x))

    def backward(checkpointed: bool) -> list[Tensor]:
        for p in (*pair.layer.parameters(), pair.x):
            p.grad = torch.ones_like(p) if filled else None
        with region():
            y = checkpoint(forward, pair.x, use_reentrant=reentrant) if checkpointed else forward(pair.x)
        y.backward(pair.g)
        return [p.grad for p in (*pair.layer.parameters(), pair.x)]

    for found, plain in zip(backward(True), backward(False), strict=True):
        assert torch.equal(found, plain)


# --- The copy of the weight -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep_from", [1, 2**21])
def test_a_weight_that_changes_before_the_backward(keep_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the input is that of the weight that was used, also if its copy's memory is kept."""
    monkeypatch.setattr(cache, "KEEP_FROM", keep_from)
    pair = Pair(4)
    used = pair.layer.weight.detach().bfloat16()
    with region():
        y = pair.layer(pair.x)
    with torch.no_grad():
        pair.layer.weight.zero_()
    with region():
        pair.layer(pair.x)
    y.backward(pair.g)
    assert pair.x.grad is not None
    torch.testing.assert_close(pair.x.grad, (pair.g.double() @ used.double()).bfloat16())


def test_a_weight_is_cast_once_for_linear_layers_and_other_products() -> None:
    w = nn.Parameter(torch.randn(OUT, IN))
    x = torch.randn(3, IN).bfloat16()
    with region():
        F.linear(x, w)
        x @ w.t()[:, :OUT]
        F.linear(x, w)
    with torch.profiler.profile() as profile, region():
        F.linear(x, w)
        F.linear(x, w)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::copy_") == 1


# --- What is not taken ----------------------------------------------------------------------------------


def is_taken(y: Tensor) -> bool:
    return y.grad_fn is not None and "_Linear" in y.grad_fn.name()


OTHERS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "torch's table": lambda layer, x: region(policy=fp.Policy.torch("cuda"))(layer)(x),
    "respect_upcast": lambda layer, x: region(respect_upcast=True)(layer)(x),
    "frozen": lambda layer, x: region()(layer.requires_grad_(False))(x),
    "no leaf": lambda layer, x: region()(F.linear)(x, layer.weight * 1),
    "float64": lambda layer, x: region()(layer.double())(x.double()),
    "16-bit weight": lambda layer, x: region()(layer.bfloat16())(x),
    "float32 region": lambda layer, x: region(FP32)(layer)(x),
    "empty": lambda layer, x: region()(layer)(x[:0]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_calls_are_as_they_were(kind: str) -> None:
    pair = Pair(4)
    assert is_taken(region()(pair.layer)(pair.x))
    assert not is_taken(OTHERS[kind](pair.layer, pair.x))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(rows=4, elements=OUT * IN))
    pair = Pair(4)
    narrow = nn.Linear(IN, OUT - 1)
    with region():
        assert is_taken(pair.layer(pair.x))
        assert is_taken(pair.layer(torch.randn(2, 2, IN)))
        assert not is_taken(pair.layer(torch.randn(5, IN)))
        assert not is_taken(narrow(pair.x))


def test_limits_of_machines() -> None:
    units = Capability("cpu", onednn_bf16=True)
    emulating = Capability("cpu", onednn_bf16=True, emulates_bf16=True)
    few, all_rows = straight_limits(BF16, units), straight_limits(BF16, emulating)
    assert few is not None
    assert all_rows is not None
    assert few.rows < all_rows.rows
    assert straight_limits(FP16, emulating) == straight_limits(FP16, units) == few
    assert straight_limits(BF16, Capability("cuda", compute_capability=(9, 0))) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_traces_and_forward_mode() -> None:
    layer = nn.Linear(IN, OUT)
    x = torch.randn(3, IN)
    exact = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with region():
        mapped = torch.vmap(layer)(x)
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        with torch.autograd.forward_ad.dual_level():
            dual = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        gradient = torch.func.grad(
            lambda w: torch.func.functional_call(layer, {"weight": w}, (x,)).float().sum()
        )(layer.weight.detach())
    torch.testing.assert_close(mapped.bfloat16(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(traced(x).bfloat16(), exact, rtol=0.02, atol=0.02)
    assert tangent is not None
    assert gradient.dtype is FP32


def test_a_recording_changes_no_gradient() -> None:
    pair = Pair(4)
    pair.run()
    plain = pair.weight_grad
    pair.layer.zero_grad()
    fp.explain(pair.layer, (pair.x,))
    with _torch.Watch(lambda *_: None):
        pair.run()
    assert torch.equal(pair.weight_grad, plain)
