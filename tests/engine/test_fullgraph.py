"""Regions inside functions that torch.compile makes one graph of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.cpu.amp import autocast as cpu_autocast
from floatplan.policy import ModuleRule

BF16, FP16 = torch.bfloat16, torch.float16
UNIFIED = fp.Policy.unified(slow_kernels=True)
OTHER = fp.Policy.torch("cuda")
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SHARED = fp.autocast("cpu", dtype=BF16, policy=UNIFIED)

# Dynamo warns of what it cannot trace in torch itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def region(**arguments: Any) -> fp.autocast:
    return fp.autocast("cpu", **{"dtype": BF16, "policy": UNIFIED, **arguments})


def block(x: Tensor) -> Any:
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        y = x @ W
        z = torch.exp(y * 0.1)
    return y, z, x @ W


def arguments_of_many_kinds(x: Tensor) -> Any:
    with fp.autocast(x, FP16, policy=UNIFIED):
        a = x @ W
    with fp.autocast(x.device, cache_enabled=False):
        b = x @ W
    with fp.autocast("cpu", policy="torch"):
        c = torch.exp(x @ W * 0.1)
    with fp.autocast("cpu", policy=fp.Policy.torch("cuda").with_ops(fp32=["aten::matmul"])):
        d = torch.exp((x @ W).bfloat16() * 0.1), x @ W
    with cpu_autocast(policy=UNIFIED):
        e = x @ W
    return a, b, c, *d, e


def nested(x: Tensor) -> Any:
    with region():
        a = x @ W
        with fp.autocast("cpu", enabled=False):
            b = x @ W
        with torch.autocast("cpu", dtype=FP16):
            c = torch.exp(x @ W * 0.1)
        with fp.autocast("cpu", FP16, policy=OTHER):
            d = torch.exp(x @ W * 0.1)
        return a, b, c, d, x @ W


def one_object_in_itself(x: Tensor) -> Any:
    again = region()
    with again:
        a = x @ W
        with again:
            b = x @ W
        c = x @ W
    return a, b, c, x @ W


def full(x: Tensor) -> Any:
    with region():
        y = x @ W
        with fp.full_precision():
            z = y @ W
            own = z.bfloat16().to(torch.get_autocast_dtype("cpu"))
        return y, z, own, y @ W


@fp.full_precision(cast_outputs=True)
def full_function(x: Tensor) -> Tensor:
    return x @ W


def calls_full(x: Tensor) -> Any:
    return full_function(x.bfloat16()), full_function(x)


@SHARED
def decorated(x: Tensor) -> Any:
    return x @ W, torch.exp((x @ W) * 0.1)


def calls_decorated(x: Tensor) -> Any:
    return *decorated(x), x @ W


def decorates(x: Tensor) -> Any:
    return region()(lambda x: x @ W)(x), x @ W


def by_hand(x: Tensor) -> Any:
    SHARED.__enter__()
    y = x @ W
    SHARED.__exit__(None, None, None)
    return y, x @ W


def upcasts(x: Tensor) -> Any:
    with region(respect_upcast=True):
        y = x @ W
        return y @ W, y.float() @ W


def raises_and_catches(x: Tensor) -> Any:
    y = x
    try:
        with region():
            y = x @ W
            raise ValueError
    except ValueError:
        return y, x @ W


def checkpointed(x: Tensor) -> Any:
    return *checkpoint(block, x, use_reentrant=False), *checkpoint(decorated, x, use_reentrant=False)


class Function(torch.autograd.Function):
    @staticmethod
    @fp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @fp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def custom_function(x: Tensor) -> Any:
    with region():
        return x @ W, Function.apply(x, W)


IN_ONE_PIECE = [
    block, arguments_of_many_kinds, nested, one_object_in_itself, full, calls_full, decorated,
    calls_decorated, decorates, by_hand, upcasts, raises_and_catches, checkpointed, custom_function,
]  # fmt: skip


def agrees(function: Callable[[Tensor], Any], compiled: Callable[[Tensor], Any], x: Tensor = X) -> None:
    """Results and gradient, twice."""

    def ran(run: Callable[[Tensor], Any]) -> tuple[list[Tensor], Tensor]:
        results = run(x)
        results = list(results) if isinstance(results, tuple) else [results]
        return results, torch.autograd.grad(sum(y.float().sum() for y in results), W)[0]

    eager, exact = ran(function)
    for _ in range(2):
        results, gradient = ran(compiled)
        assert [y.dtype for y in results] == [y.dtype for y in eager]
        for ours, theirs in zip(results, eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)
        torch.testing.assert_close(gradient, exact, rtol=2e-2, atol=5e-2)


@pytest.mark.trouble("T110")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", IN_ONE_PIECE, ids=lambda f: f.__name__)
def test_in_one_piece_as_eager(function: Callable[[Tensor], Any], backend: str) -> None:
    agrees(function, torch.compile(function, backend=backend, fullgraph=True))


@pytest.mark.trouble("T110")
def test_inductor_and_dynamic_shapes() -> None:
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (4, 7, 16):
        agrees(block, compiled, torch.randn(rows, 8))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + x)


@pytest.mark.parametrize("precisions", [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_plan_in_one_piece(precisions: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = Net()
    fp.Plan(precisions[0], (ModuleRule("inner.*", precisions[1]),)).apply(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results = model(X), compiled(X)
        assert results[0].dtype is results[1].dtype
        torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)
        wanted, got = (torch.autograd.grad(y.float().sum(), list(model.parameters())) for y in results)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)


def test_many_decorated_functions_are_compiled_each() -> None:
    """Dynamo counts recompilations per code object and stops after eight."""
    compiled = [torch.compile(region()(lambda x, n=n: x @ W + n), backend="eager") for n in range(12)]
    torch._dynamo.utils.counters.clear()
    for number, each in enumerate(compiled):
        torch.testing.assert_close(each(X), (X.bfloat16() @ W.bfloat16()) + number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12


class Counted:
    """A backend that counts the graphs it gets."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph


def test_the_region_around_is_guarded() -> None:
    """A graph of one policy never runs under another, with a region in it or not."""

    def around_and_inside(x: Tensor) -> Any:
        a = torch.exp(x * 0.1)
        with fp.autocast("cpu", enabled=False):
            b = torch.exp(x * 0.1)
        with fp.autocast("cpu", dtype=BF16, policy=OTHER):
            c = x @ x.T
        return a, b, c, torch.exp(x * 0.1)

    compiled = torch.compile(around_and_inside, backend="aot_eager", fullgraph=True)
    low = X.bfloat16()
    for _ in range(2):
        for policy in (UNIFIED, fp.Policy.torch("cpu"), OTHER):
            for dtype in (BF16, torch.float32):
                with fp.autocast("cpu", dtype=dtype, policy=policy, enabled=dtype is BF16):
                    wanted = [y.dtype for y in around_and_inside(low)]
                    assert [y.dtype for y in compiled(low)] == wanted
        assert [y.dtype for y in compiled(low)] == [BF16] * 4


def test_regions_that_do_the_same_share_a_graph() -> None:
    def inside(x: Tensor, policy: fp.Policy, dtype: torch.dtype) -> Tensor:
        with fp.autocast("cpu", dtype, policy=policy):
            return x @ W

    counted = Counted()
    compiled = torch.compile(inside, backend=counted, fullgraph=True)
    for policy, dtype, graphs in (
        (UNIFIED, BF16, 1),
        (UNIFIED, BF16, 1),
        (UNIFIED, FP16, 2),
        (OTHER, BF16, 3),
    ):
        assert compiled(X, policy, dtype).dtype is dtype
        assert len(counted.graphs) == graphs


def test_the_outer_region_is_in_force_again_after_an_inner_one() -> None:
    def inner(x: Tensor) -> Any:
        with fp.autocast("cpu", FP16, policy=OTHER):
            a = x @ W
        return a, x @ W, torch.exp(x.bfloat16() * 0.1)

    compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with region():
            before = X @ W
            assert [y.dtype for y in compiled(X)] == [FP16, BF16, torch.float32]
            assert (X @ W).dtype is before.dtype is BF16
    assert [y.dtype for y in compiled(X)] == [FP16, torch.float32, BF16]
