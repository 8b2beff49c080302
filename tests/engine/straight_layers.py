"""What the tests of the weight's gradient share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import floatplan as fp
from floatplan import _torch
from floatplan.engine import cache, weight_gradient
from floatplan.engine.capability import StraightLimits

BF16, FP32 = torch.bfloat16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
OUT, IN = 24, 16


def region(low: torch.dtype = BF16, **options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, **{"policy": UNIFIED, **options})


@pytest.fixture(autouse=True)
def all_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine, whoever runs the tests; and small tensors show what large ones do."""
    monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(rows=2**62, elements=0))
    monkeypatch.setattr(_torch, "other_threads", lambda: 0)
    monkeypatch.setattr(cache, "SHARE_FROM", 0)
    fp.cast_cache().clear()
    torch.manual_seed(0)


class Pair:
    """A layer, an input and a gradient of its output, in 16 bits, and what float64 makes of them."""

    def __init__(self, *rows: int, low: torch.dtype = BF16, bias: bool = True) -> None:
        self.layer = nn.Linear(IN, OUT, bias=bias)
        self.x = torch.randn(*rows, IN).to(low).requires_grad_()
        self.g = torch.randn(*rows, OUT).to(low)

    def run(self, **options: Any) -> Tensor:
        """Forward in a region and backward outside of it."""
        with region(self.x.dtype):
            y = self.layer(self.x)
        y.backward(self.g, **options)
        return y

    @property
    def of_weight(self) -> Tensor:
        return self.g.reshape(-1, OUT).double().T @ self.x.detach().reshape(-1, IN).double()

    @property
    def weight_grad(self) -> Tensor:
        assert self.layer.weight.grad is not None
        return self.layer.weight.grad


def assert_exact(found: Tensor | None, exact: Tensor) -> None:
    """To rounding in float32, which 16-bit values do not come near."""
    assert found is not None
    assert found.dtype is FP32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


class Made(TorchDispatchMode):
    """Counts the operators that made or wrote a float32 tensor of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.names = shape, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moves = isinstance(result, Tensor) and not func.is_view
        if moves and result.shape == self.shape and result.dtype is FP32:
            self.names[func.overloadpacket.__name__] += 1
        return result


@contextmanager
def moved(names: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a backward does with float32 tensors of the weight's shape is this and no more."""
    monkeypatch.setattr(_torch, "is_traced", lambda: False)  # the mode below only looks
    with Made((OUT, IN)) as made:
        yield
    assert made.names == names
