"""Rows that were seen on `torch.amp`: what it does there, next to what a region of floatplan does.

Other tests of these rows look at floatplan alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import floatplan as fp
from floatplan.engine import cache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def ours(**options: Any) -> fp.autocast:
    return fp.autocast("cpu", **{"dtype": BF16, "policy": UNIFIED, **options})


def theirs(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **{"dtype": BF16, **options})


def here() -> torch.dtype:
    return (A @ A).dtype


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor counts as small, so that small ones show what large ones do."""
    monkeypatch.setattr(cache, "SHARE_FROM", 0)


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    fp.cast_cache().clear()


@pytest.fixture
def put_back() -> Iterator[None]:
    """Torch's regions leak in these tests."""
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", BF16)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()


# --- Regions ------------------------------------------------------------------------------------------


@pytest.mark.trouble("T60")
def test_torch_goes_on_with_the_weight_from_before_a_step() -> None:
    results = []
    for region in (ours(), theirs()):
        layer = nn.Linear(4, 4, bias=False)
        with region:
            before = layer(A)
            before.float().sum().backward()
            torch.optim.SGD(layer.parameters(), lr=1.0).step()
            stepped = layer(A)
            layer.weight.detach().zero_()
            results.append((torch.equal(stepped, before), bool(layer(A).any())))
    assert results == [(False, False), (True, True)]


def recursive(region: Any) -> None:
    @region
    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)

    descend(2)


@pytest.mark.trouble("T62")
@pytest.mark.usefixtures("put_back")
def test_torchs_regions_leak_when_their_function_calls_itself() -> None:
    recursive(ours())
    assert here() is FP32
    with ours():
        recursive(ours(enabled=False))
        assert here() is BF16
    recursive(theirs())
    assert torch.is_autocast_enabled("cpu")  # and from now on
    with torch.autocast("cpu", dtype=BF16):
        recursive(theirs(enabled=False))
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.trouble("T64")
@pytest.mark.parametrize("make", [ours, theirs], ids=["ours", "torch's"])
def test_torchs_decorator_does_nothing_for_generators_and_coroutines(make: Callable[..., Any]) -> None:
    @make()
    def values() -> Iterator[torch.dtype]:
        yield here()

    @make()
    async def value() -> torch.dtype:
        return here()

    seen = {*values(), asyncio.run(value())}
    assert seen == {BF16 if make is ours else FP32}


class Product(torch.autograd.Function):
    """As people write them: the backward says nothing of autocast."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, seen: list[torch.dtype]) -> Tensor:
        ctx.save_for_backward(a)
        ctx.seen = seen
        return a @ a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        ctx.seen.append((a @ a).dtype)
        return grad, None


class Decorated(Product):
    forward = staticmethod(fp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(fp.custom_bwd(Product.backward, device_type="cpu"))


@pytest.mark.trouble("T70")
@pytest.mark.parametrize("function", [Decorated, Product])
def test_a_backward_called_inside_of_the_region(function: type[torch.autograd.Function]) -> None:
    """The decorators make it independent of where it is called; without them torch's depends on that."""
    seen: list[torch.dtype] = []
    for inside in (True, False):
        with ours() if function is Decorated else theirs():
            loss = function.apply(A.clone().requires_grad_(), seen).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    assert seen == [BF16, BF16 if function is Decorated else FP32]


@pytest.mark.trouble("T71")
def test_what_another_thread_caches_is_seen_and_cleared() -> None:
    """Torch shows nothing of its cache."""
    layer = nn.Linear(4, 4, bias=False)
    filled, cleared = threading.Event(), threading.Event()
    again: list[int] = []

    def work() -> None:
        with ours():
            layer(A)
            filled.set()
            cleared.wait(30)
            held = fp.cast_cache().copies
            layer(A)
            again.append(len(fp.cast_cache().copies) - len(held))

    thread = threading.Thread(target=work)
    thread.start()
    filled.wait(30)
    assert [(copy.shape, copy.dtype, copy.nbytes) for copy in fp.cast_cache().copies] == [
        ((4, 4), BF16, 32)
    ] * 2
    assert fp.cast_cache().nbytes == 64
    torch.clear_autocast_cache()
    assert fp.cast_cache().nbytes == 64
    fp.cast_cache().clear()
    assert fp.cast_cache().copies == ()
    cleared.set()
    thread.join()
    assert again == [2]  # both cast again


@pytest.mark.trouble("T73")
@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0), A, "cpu:0"], ids=str)
def test_torch_takes_no_device_but_a_string(device: Any) -> None:
    if not isinstance(device, str):
        with pytest.raises((RuntimeError, ValueError), match=r"device_type|unsupported autocast"):
            torch.autocast(device, dtype=BF16)
    with fp.autocast(device, dtype=BF16, policy=UNIFIED):
        assert here() is BF16


@pytest.mark.trouble("T74")
def test_torch_has_no_region_of_float32() -> None:
    x = A.bfloat16()
    with ours(dtype=FP32):
        assert (x @ A).dtype is FP32
    with pytest.warns(UserWarning, match=r"(?s)not supported.*Disabling"):
        region = torch.autocast("cpu", dtype=FP32)
    with region, pytest.raises(RuntimeError):
        x @ A


@pytest.mark.trouble("T76")
@pytest.mark.skipif("torch.cuda.is_available()")
def test_torch_only_warns_where_there_is_no_cuda() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert torch.autocast("cuda")._enabled is False
    with pytest.raises(fp.FloatplanError, match="CUDA is not available here"):
        fp.autocast("cuda", strict=True)


# --- Operators of other libraries -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Operators whose kernels take float32 only, as many CUDA kernels do."""

    def needs_float32(*tensors: Tensor) -> None:
        if any(tensor.dtype is not FP32 for tensor in tensors):
            raise RuntimeError("expected scalar type Float")

    def scale(x: Tensor, y: Tensor) -> Tensor:
        needs_float32(x, y)
        return x * y

    def sums(xs: list[Tensor], *, weight: Tensor | None = None) -> list[Tensor]:
        needs_float32(*xs, *([] if weight is None else [weight]))
        return [x * (1.0 if weight is None else weight) for x in xs]

    def add_into(buffer: Tensor, x: Tensor) -> None:
        needs_float32(buffer, x)
        buffer.add_(x)

    lib = torch.library.Library("floatplan_rows", "DEF")  # type: ignore[no-untyped-call]
    lib.define("scale(Tensor x, Tensor y) -> Tensor")
    lib.define("sums(Tensor[] xs, *, Tensor? weight=None) -> Tensor[]")
    lib.define("add_into(Tensor(a!) buffer, Tensor x) -> ()")
    for name, function in (("scale", scale), ("sums", sums), ("add_into", add_into)):
        lib.impl(name, function, "CompositeExplicitAutograd")
    yield torch.ops.floatplan_rows
    lib._destroy()  # type: ignore[no-untyped-call]


CALLS: dict[str, Callable[[Any], Tensor]] = {
    "scale": lambda ops: ops.scale(A @ A, A),
    "kin: a list and a keyword": lambda ops: ops.sums([A @ A, A], weight=A.bfloat16())[0],
    "kin: an argument that is written": lambda ops: (
        buffer := torch.zeros(4, 4),
        ops.add_into(buffer, A @ A),
    )[0],
}


@pytest.mark.trouble("T91")
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_whose_kernel_takes_float32_only(name: str, library: Any) -> None:
    policy = UNIFIED.with_ops(
        fp32=["floatplan_rows::scale", "floatplan_rows::sums"], destination=["floatplan_rows::add_into"]
    )
    with theirs(), pytest.raises(RuntimeError, match="expected scalar type Float"):
        CALLS[name](library)
    with ours(policy=policy):
        assert CALLS[name](library).dtype is FP32


# --- Copies of weights ----------------------------------------------------------------------------------


@pytest.mark.trouble("T104")
def test_what_a_region_holds_in_inference_does_not_grow_and_can_be_read() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    weights = sum(parameter.numel() for parameter in model.parameters())
    held = []
    with torch.no_grad(), ours():
        for _ in range(8):
            model(torch.randn(2, 16))
            held.append(fp.cast_cache().nbytes)
    assert held == [2 * weights] * 8  # two bytes a weight, and nothing of the batches
    assert fp.cast_cache().nbytes == 0
    with torch.no_grad(), ours(cache_enabled=False):
        model(torch.randn(2, 16))
        assert fp.cast_cache().nbytes == 0


@pytest.mark.trouble("T104")
def test_a_region_around_each_module_holds_the_copies_of_one() -> None:
    """The narrow scope that keeps the memory down."""
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
    x = torch.randn(2, 16)
    held = []
    with torch.no_grad():
        for layer in model:
            with ours():
                x = layer(x)
                held.append(len(fp.cast_cache().copies))
    assert max(held) <= 2  # the weight and what came in


# --- Norms of mixed dtypes ------------------------------------------------------------------------------

OTHER = {BF16: FP16, FP16: BF16}
NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "group_norm": lambda x, w, b: F.group_norm(x.reshape(4, 8), 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x.reshape(4, 8), None, None, w, b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x.reshape(2, 8, 2), None, None, w, b),
    "kin: frozen batch_norm": lambda x, w, b: F.batch_norm(x.reshape(4, 8), b, w.abs() + 1, w, b),
}
MIXES: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "weight of the other format": lambda w, low: w.to(OTHER[low]),
    "weight of float32, bias of 16 bits": lambda w, low: w,
    "kin: float32 between 16-bit weights": lambda w, low: w.to(low),
}


@pytest.mark.trouble("T107")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_take_any_mix_of_dtypes(name: str, mix: str, low: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((4, 8), (8,), (8,)))
    x = x if mix.startswith("kin") else x.to(low)
    w = MIXES[mix](w, low)
    b = b.to(low) if mix != "weight of the other format" else b.to(OTHER[low])
    with theirs(dtype=low), pytest.raises(RuntimeError):
        NORMS[name](x, w, b)
    with ours(dtype=low):
        result = NORMS[name](x, w, b)
    assert result.dtype is x.dtype
    exact = NORMS[name](x.float(), w.float(), b.float())
    torch.testing.assert_close(result.float(), exact, rtol=torch.finfo(low).eps, atol=torch.finfo(low).eps)
