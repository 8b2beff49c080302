"""True float32 regions, the caller's own casts, and strictness."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import floatplan as fp
from floatplan.engine import settings
from floatplan.errors import DeviceError, PrecisionWarning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def low(**options: object) -> fp.autocast:
    return fp.autocast("cpu", dtype=BF16, policy=UNIFIED, **options)  # type: ignore[arg-type]


@pytest.mark.trouble("T74")
def test_a_region_of_float32_takes_low_inputs_up() -> None:
    x = A.bfloat16()
    for inner in (fp.full_precision(), fp.autocast("cpu", dtype=FP32)):
        with low(), inner:
            for result in (
                x @ x,
                F.linear(x, A),
                F.softmax(x, 0),
                F.layer_norm(x, (4,)),
                torch.cat([x, x]),
                x.sum(),
            ):
                assert result.dtype is FP32
            assert torch.equal(x @ x, x.float() @ x.float())
            with low():
                assert (A @ A).dtype is BF16
            assert torch.mm(A.double(), A.double()).dtype is torch.float64
        with low():
            assert (A @ A).dtype is BF16


@pytest.mark.trouble("T75")
def test_low_inputs_meet_float32_weights() -> None:
    layer = torch.nn.Linear(4, 4)
    x = A.bfloat16()
    with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError):
        layer(x)

    @fp.full_precision()
    def head(x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        assert x.dtype is scale.dtype is FP32
        return F.relu(layer(x) * scale) + x

    with low():
        assert head(x, scale=x).dtype is FP32
    assert not torch.is_autocast_enabled("cpu")


class Pair(NamedTuple):
    value: torch.Tensor
    index: torch.Tensor


@pytest.mark.trouble("T99")
def test_a_decorator_casts_outputs_back_when_asked() -> None:
    index = torch.arange(4)

    @fp.full_precision(cast_outputs=True)
    def difference(pair: Pair, other: list[torch.Tensor]) -> dict[str, object]:
        assert pair.value.dtype is other[0].dtype is FP32
        return {"difference": pair.value - other[0], "pair": pair, "double": A.double()}

    result = difference(Pair(A.half(), index), [A.bfloat16()])
    assert isinstance(result["pair"], Pair)
    assert result["difference"].dtype is result["pair"].value.dtype is FP16  # type: ignore[union-attr]
    assert result["pair"].index is index
    assert result["double"].dtype is torch.float64  # type: ignore[union-attr]
    assert difference(Pair(A, index), [A])["difference"].dtype is FP32  # type: ignore[union-attr]


def test_a_generator_in_full_precision() -> None:
    @fp.full_precision()
    def stream(x: torch.Tensor) -> Iterator[torch.dtype]:
        assert x.dtype is FP32
        yield (x @ A.bfloat16()).dtype
        yield (x @ A.bfloat16()).dtype

    with low():
        values = stream(A.bfloat16())
        assert [next(values), (A @ A).dtype, next(values)] == [FP32, BF16, FP32]
    with pytest.raises(TypeError, match="cast_outputs=True takes a plain function"):
        fp.full_precision(cast_outputs=True)(stream)
    assert inspect.isgeneratorfunction(stream)
    with pytest.raises(TypeError, match=r"full_precision\(\) decorates a function, got Tensor"):
        fp.full_precision()(A)  # type: ignore[arg-type]


@pytest.mark.trouble("T95")
def test_an_explicit_upcast_wins_where_that_is_asked() -> None:
    positions = torch.arange(1000)
    frequencies = torch.ones(1)
    for plain in (torch.autocast("cpu", dtype=BF16), low()):
        with plain:
            assert (positions.float()[:, None] @ frequencies[None, :]).unique().numel() < 600
    with low(respect_upcast=True):
        kept = positions.float()[:, None] @ frequencies[None, :]
        assert (kept.dtype, kept.unique().numel()) == (FP32, 1000)
        x = A.bfloat16()
        assert (x.float() @ A).dtype is FP32
        assert (x.to(FP32).t() @ A).dtype is FP32  # a view of what was cast
        assert F.linear(x.float()[:2], A).dtype is FP32
        assert (x @ A).dtype is BF16
        assert (A @ A).dtype is BF16  # float32 from the start: nobody asked
        assert (x.float().bfloat16() @ A).dtype is BF16
        assert torch.exp(x).dtype is FP32
        assert (torch.exp(x) @ A).dtype is BF16  # the engine's own cast is not the caller's word
    with low():
        assert (A.bfloat16().float() @ A).dtype is BF16


def test_gradients_flow_through_a_respected_upcast() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    x = A.bfloat16().requires_grad_()
    with low(respect_upcast=True):
        (x.float() @ w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, x.detach().float().t() @ torch.ones(4, 4))
    assert x.grad is not None
    assert x.grad.dtype is BF16


@pytest.mark.trouble("T76")
def test_strict_raises_where_the_asked_precision_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_said", {("cpu", FP16)})
    with pytest.raises(DeviceError, match="convolutions stay in float32 in place of float16"):
        fp.autocast("cpu", dtype=FP16, strict=True)
    fp.autocast("cpu", dtype=FP16)  # said before
    with pytest.raises(DeviceError, match=r"disabled: torch.float64 is not a low-precision dtype"):
        fp.autocast("cpu", dtype=torch.float64, strict=True)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="CUDA is not available here"):
            fp.autocast("cuda", strict=True)
    low(strict=True)
    with pytest.warns(PrecisionWarning, match="torch's own table has no float32 regions"):
        fp.autocast("cpu", dtype=FP32, policy="torch")


@pytest.mark.trouble("T73")
def test_the_device_of_a_tensor() -> None:
    with fp.autocast(A, dtype=BF16, policy=UNIFIED):
        assert (A @ A).dtype is BF16
