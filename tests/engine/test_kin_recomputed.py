"""Kin of what users ran into with recomputation and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import floatplan as fp
from floatplan.engine import cache

BF16, FP32 = torch.bfloat16, torch.float32
A = torch.randn(4, 4)


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor counts as small, so that small ones show what large ones do."""
    monkeypatch.setattr(cache, "SHARE_FROM", 0)


def region(**options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=BF16, policy=fp.Policy.unified(slow_kernels=True), **options)


def here() -> torch.dtype:
    return (A @ A).dtype


# --- Recomputation ------------------------------------------------------------------------------------

NET = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
INPUT = torch.randn(2, 4, requires_grad=True)
inside = region()(lambda x: NET(x))


class InRegion(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        with region():
            return self.part(x)  # type: ignore[no-any-return]


def nested(reentrant: bool) -> Tensor:
    outer = region()(lambda x: NET[1:](checkpoint(region()(NET[0]), x, use_reentrant=reentrant)))
    return checkpoint(outer, INPUT, use_reentrant=reentrant)  # type: ignore[no-any-return]


def without_early_stop() -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(inside, INPUT, use_reentrant=False)  # type: ignore[no-any-return]


def selective() -> Tensor:
    chosen = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
    return checkpoint(inside, INPUT, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def packed() -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor):
        return NET(INPUT)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[], Tensor]] = {
    "in a checkpoint, reentrant": lambda: nested(True),
    "in a checkpoint": lambda: nested(False),
    "in parts": lambda: checkpoint_sequential(
        nn.Sequential(*map(InRegion, NET)), 2, INPUT, use_reentrant=False
    ),
    "to its end": without_early_stop,
    "but for products": selective,
    "with packed tensors": packed,
}


@pytest.mark.trouble("T115")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_gradients_are_those_of_a_plain_forward(way: str, warm: bool) -> None:
    """Whether or not the copies of the weights were there already when the checkpoint was entered."""

    def gradients(forward: Callable[[], Tensor]) -> list[Tensor | None]:
        sources = [INPUT, *NET.parameters()]
        for source in sources:
            source.grad = None
        with region():
            if warm:
                NET(INPUT)
            result = forward()
            assert result.dtype is BF16
        result.float().sum().backward()
        return [source.grad for source in sources]

    mine, plain = gradients(WAYS[way]), gradients(lambda: NET(INPUT))
    assert all(torch.equal(got, wanted) for got, wanted in zip(mine, plain, strict=True))


# --- Compilation --------------------------------------------------------------------------------------

LAYER = nn.Linear(4, 4)
COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: torch.exp(LAYER(x)).sum(),
    "a mixed sum": lambda x: LAYER(x) + x,
    "a mixed join": lambda x: torch.cat([LAYER(x), x]),
    "a write": lambda x: torch.zeros(4, 4).index_add_(0, torch.tensor([0]), LAYER(x)[:1]),
    "deviation": lambda x: LAYER(x).std(),
    "a look-up": lambda x: F.embedding(torch.tensor([1]), x),
    "a float32 part": lambda x: fp.full_precision()(lambda y: y @ y.T)(LAYER(x)),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.trouble("T110")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_functions_called_in_a_region_agree_with_eager_ones(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], backend="aot_eager")
    with region():
        wanted, got = COMPILED[name](A), compiled(A)
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert compiled(A).dtype is COMPILED[name](A).dtype is FP32


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.trouble("T65")
def test_an_exception_in_a_compiled_region_leaves_nothing() -> None:
    torch._dynamo.reset()

    def fails(x: Tensor) -> Tensor:
        with region():
            y = x @ x
            raise ValueError(str(y.dtype))

    with pytest.raises(ValueError, match="bfloat16"):
        torch.compile(fails, backend="eager")(A)
    assert here() is FP32


@pytest.mark.trouble("T110")
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_interpolation_has_one_dtype_eager_and_compiled(mode: str) -> None:
    """The compiler takes the operator apart before it meets the one that torch's table of CUDA names."""

    def twice_as_large(x: Tensor) -> Tensor:
        with region():
            return F.interpolate(x, scale_factor=2, mode=mode)

    x = torch.randn(1, 2, 3, 3).bfloat16()
    compiled = torch.compile(twice_as_large, backend="aot_eager")
    assert compiled(x).dtype is twice_as_large(x).dtype is FP32


@pytest.mark.trouble("T114")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_with_torchs_own_kernels_inside_of_a_checkpointed_function(reentrant: bool) -> None:
    """It is exact, whatever region is around and however many policies the process has used."""
    weight = torch.randn(4, 4, requires_grad=True)

    def function(w: Tensor) -> Tensor:
        with fp.autocast("cpu", dtype=BF16, policy="torch"):
            return (w @ w).float()

    gradients = []
    for call in (function, functools.partial(checkpoint, function, use_reentrant=reentrant)):
        weight.grad = None
        with region():
            result = call(weight)
        result.sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=2**-7, atol=2**-7)  # torch's cast cache sums in 16 bits
