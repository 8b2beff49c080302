"""torch.compile and torch.export with regions around, inside, and nowhere near."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import floatplan as fp
from floatplan.errors import RegionError

BF16 = torch.bfloat16
UNIFIED = fp.Policy.unified(slow_kernels=True)
W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)
SHARED = fp.autocast("cpu", dtype=BF16, policy=UNIFIED)

# Dynamo warns of what it cannot trace in torch itself; torch.export of its own tree of parameters.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def new_region(x: torch.Tensor) -> torch.Tensor:
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        y = torch.exp((x @ W) * 0.1)
    return y.sum()


def shared_region(x: torch.Tensor) -> torch.Tensor:
    with SHARED:
        y = torch.exp((x @ W) * 0.1)
    return y.sum()


@SHARED
def decorated(x: torch.Tensor) -> torch.Tensor:
    return torch.exp((x @ W) * 0.1).sum()


class InForward(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
            y = x @ W
        return torch.exp(y.float() * 0.1).sum()


@pytest.mark.trouble("T110")
@pytest.mark.parametrize(
    "function", [new_region, shared_region, decorated, InForward()], ids=lambda f: str(f)[:24]
)
def test_a_region_inside_a_compiled_function_casts(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    eager = function(X)
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        result = compiled(X)
        assert result.dtype is eager.dtype
        torch.testing.assert_close(result, eager, rtol=1e-2, atol=0)
    (exact,) = torch.autograd.grad(eager, W)
    (gradient,) = torch.autograd.grad(result, W)
    torch.testing.assert_close(gradient, exact, rtol=2e-2, atol=1e-3)


def test_one_compiled_function_under_two_policies() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.exp(x), backend="aot_eager", fullgraph=True)
    low = X.bfloat16()
    for policy, expected in (
        (UNIFIED, torch.float32),
        (fp.Policy.torch("cpu"), BF16),
        (UNIFIED, torch.float32),
    ):
        with fp.autocast("cpu", dtype=BF16, policy=policy):
            assert compiled(low).dtype is expected
    assert compiled(low).dtype is BF16


PLAIN = """
import torch
torch.manual_seed(0)
x, w = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
f = torch.compile(lambda x, w: ((x @ w).cumsum(0).cumsum(0) * 0.1).tanh().sum())
with torch.autocast("cpu"):
    loss = f(x, w)
loss.backward()
print(w.grad.double().abs().sum().item())
"""
# The first region is entered in a thread: what marks the caches must reach the others.
AFTER_OURS = """
import threading, warnings, torch, floatplan as fp
def use():
    for policy in (fp.Policy.unified(slow_kernels=True), fp.Policy.torch("cuda")):
        with fp.autocast("cpu", policy=policy):
            torch.ones(2, 2) @ torch.ones(2, 2)
thread = threading.Thread(target=use); thread.start(); thread.join()
"""


def run(script: str, cache: Path) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif("sys.platform == 'win32'", reason="inductor needs a C++ compiler that finds its headers")
def test_plain_torch_compiles_as_without_us_and_shares_its_cache_safely(tmp_path: Path) -> None:
    """A process that used floatplan, then one that never did, on one cache folder; and the reverse."""
    alone = run(PLAIN, tmp_path / "a")
    assert run(AFTER_OURS + PLAIN, tmp_path / "b") == alone
    assert run(PLAIN, tmp_path / "b") == alone
    assert run(AFTER_OURS + PLAIN, tmp_path / "a") == alone


class Product(torch.nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            return x @ self.weight


def test_export_does_not_drop_a_region_in_silence() -> None:
    for policy in (UNIFIED, "torch"):
        ours = Product(lambda policy=policy: fp.autocast("cpu", dtype=BF16, policy=policy))
        with pytest.raises(RegionError, match=r"torch.export records a program without floatplan's regions"):
            torch.export.export(ours, (X,), strict=False)
        assert ours(X).dtype is BF16
