"""Where a compiled function with regions cannot be one graph; exceptions, threads and processes."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fullgraph import BF16, SHARED, UNIFIED, Counted, W, X, agrees, calls_decorated, region
from torch import Tensor, nn

import floatplan as fp

# Dynamo warns of what it cannot trace in torch itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def deeper(x: Tensor) -> Tensor:
    return torch.tanh(x @ W)


def cut_inside(x: Tensor) -> Any:
    with region():
        y = deeper(x)
        torch._dynamo.graph_break()
        z = deeper(y)
    return y, z, x @ W


@SHARED
def cut_in_decorated(x: Tensor) -> Any:
    y = x @ W
    torch._dynamo.graph_break()
    return y, y @ W


def cut_by_hand(x: Tensor) -> Any:
    SHARED.__enter__()
    y = x @ W
    torch._dynamo.graph_break()
    z = y @ W
    SHARED.__exit__(None, None, None)
    return y, z, x @ W


def cut_between(x: Tensor) -> Any:
    mine = region()
    y = x @ W
    torch._dynamo.graph_break()
    with mine:
        return y, x @ W


def made_outside(x: Tensor) -> Any:
    with SHARED:
        return x @ W, deeper(x)


def generator(x: Tensor) -> Any:
    @SHARED
    def stretches() -> Any:
        yield x @ W
        yield x @ W

    return (*stretches(), x @ W)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "function",
    [cut_inside, cut_in_decorated, cut_by_hand, cut_between, made_outside, generator],
    ids=lambda f: f.__name__,
)
def test_a_cut_graph_as_eager(function: Callable[[Tensor], Any], backend: str) -> None:
    agrees(function, torch.compile(function, backend=backend))


@pytest.mark.parametrize("function", [cut_inside, cut_in_decorated, made_outside], ids=lambda f: f.__name__)
def test_what_is_around_and_below_a_cut_stays_compiled(function: Callable[[Tensor], Any]) -> None:
    def caller(x: Tensor) -> Any:
        return function(x * 2)

    counted = Counted()
    compiled = torch.compile(caller, backend=counted)
    compiled(X)
    names = [node.target for graph in counted.graphs for node in graph.graph.nodes]
    assert names.count(operator.mul) == 1
    assert names.count(operator.matmul) >= 1


def test_a_region_made_in_a_compiled_function_and_used_outside() -> None:
    def makes(x: Tensor) -> Any:
        return region(), x + 1

    compiled = torch.compile(makes, backend="eager", fullgraph=True)
    mine, _ = compiled(X)
    assert mine.policy is UNIFIED
    assert repr(mine) == repr(region())
    mine, _ = compiled(X)
    with mine:
        assert (X @ W).dtype is BF16
    assert not hasattr(mine, "nothing")


def test_a_mistake_is_said_as_without_the_compiler() -> None:
    def mistaken(x: Tensor) -> Tensor:
        with fp.autocast("cpu", policy="no such policy"):
            return x @ W

    with pytest.raises(fp.FloatplanError, match="policy must be 'unified'"):
        torch.compile(mistaken, backend="eager")(X)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it is one that raises"):
        torch.compile(mistaken, backend="eager", fullgraph=True)(X)


def test_strict_export_does_not_drop_a_region_in_silence() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with region():
                return x @ x.T

    with pytest.raises(Exception, match=r"torch.export would lose"):
        torch.export.export(Model(), (X,), strict=True)


@pytest.mark.trouble("T65")
@pytest.mark.parametrize("how", ["traced", "called", "lost"])
def test_an_exception_leaves_no_region(how: str) -> None:
    @torch.library.custom_op(f"floatplan_test::refuses_{how}", mutates_args=())
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("refused")

    @refuses.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def function(x: Tensor) -> Tensor:
        with region():
            y = x @ W
            if how == "traced":
                return y @ torch.ones(3, 3)
            if how == "called":
                return refuses(y)
            raise ValueError("refused")

    # The state of the thread is compared after every test.
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)):
            compiled(X)


def test_threads_compile_and_run_one_function() -> None:
    compiled = torch.compile(calls_decorated, backend="aot_eager", fullgraph=True)
    found: list[list[torch.dtype]] = []

    def run() -> None:
        found.extend([y.dtype for y in compiled(X)] for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[BF16, torch.float32, torch.float32]] * 9


USES = """
import sys, torch, floatplan as fp
policy = fp.Policy.unified(slow_kernels=True)
if sys.argv[1] == "changed":
    policy = policy.with_ops(fp32=["aten::matmul"])
w = torch.ones(8, 8, requires_grad=True)
def inside(x, w):
    with fp.autocast("cpu", dtype=torch.bfloat16, policy=policy):
        return torch.tanh(x @ w)
result = torch.compile(inside, fullgraph=True)(torch.ones(4, 8), w)
result.float().sum().backward()
print(result.dtype)
"""


@pytest.mark.skipif("sys.platform == 'win32'", reason="inductor needs a C++ compiler that finds its headers")
def test_processes_with_other_policies_share_a_cache_safely(tmp_path: Path) -> None:
    """The graph says only the number of the policy, which is the first of each process."""
    found = []
    for policy in ("as it is", "changed", "as it is"):
        done = subprocess.run(
            [sys.executable, "-c", USES, policy],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]


def test_regions_alone_do_not_import_the_compiler() -> None:
    script = (
        "import sys, torch, floatplan as fp\n"
        "with fp.autocast('cpu'), fp.full_precision(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "fp.autocast('cpu')(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
