"""Regions: nesting, decorators, threads, exceptions, and life beside torch.autocast."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.errors import PolicyError, PrecisionWarning, RegionError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def bf16(**options: object) -> fp.autocast:
    return fp.autocast("cpu", dtype=BF16, **options)  # type: ignore[arg-type]


def test_context_manager_and_nesting() -> None:
    with bf16(policy=UNIFIED):
        assert (A @ A).dtype is BF16
        with fp.autocast("cpu", dtype=FP16, policy=UNIFIED):
            assert (A @ A).dtype is FP16
            with fp.autocast("cpu", enabled=False):
                assert (A @ A).dtype is FP32
                with bf16(policy=UNIFIED):
                    assert (A @ A).dtype is BF16
            assert (A @ A).dtype is FP16
        assert (A @ A).dtype is BF16
    assert (A @ A).dtype is FP32


def test_nested_policies_each_hold_in_their_region() -> None:
    x = A.bfloat16()
    with bf16(policy=UNIFIED):
        assert torch.exp(x).dtype is FP32
        with bf16(policy="torch"):
            assert torch.exp(x).dtype is BF16
            with bf16(policy=fp.Policy.torch("cuda")):
                assert torch.exp(x).dtype is FP32
                assert torch.softmax(x, 0).dtype is FP32
            assert torch.exp(x).dtype is BF16
        assert torch.softmax(x, 0).dtype is BF16
        assert torch.exp(x).dtype is FP32


def test_torch_regions_inside_and_outside_ours() -> None:
    x = A.bfloat16()
    with torch.autocast("cpu", dtype=BF16):
        assert torch.exp(x).dtype is BF16
        with bf16(policy=UNIFIED):
            assert torch.exp(x).dtype is FP32
            with torch.autocast("cpu", enabled=False):
                assert torch.exp(x).dtype is BF16
                assert (A @ A).dtype is FP32
            with fp.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=FP16):
                assert torch.exp(x).dtype is BF16  # torch's table: our disabled region ended our policy
                assert (A @ A).dtype is FP16
        assert torch.exp(x).dtype is BF16
        assert (A @ A).dtype is BF16


@pytest.mark.trouble("T62")
def test_recursion_and_re_entry_of_one_object() -> None:
    on = bf16(policy=UNIFIED)

    @on
    def descend(depth: int) -> list[torch.dtype]:
        return [(A @ A).dtype, *(descend(depth - 1) if depth else [])]

    assert descend(3) == [BF16] * 4
    assert not torch.is_autocast_enabled("cpu")
    with on, on:
        with on:
            assert (A @ A).dtype is BF16
        assert (A @ A).dtype is BF16
    assert (A @ A).dtype is FP32

    off = fp.autocast("cpu", enabled=False)

    @off
    def descend_off(depth: int) -> None:
        assert (A @ A).dtype is FP32
        if depth:
            descend_off(depth - 1)

    with on:
        descend_off(2)
        assert (A @ A).dtype is BF16


@pytest.mark.trouble("T65")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_ends_the_region(error: type[BaseException]) -> None:
    @bf16(policy=UNIFIED)
    def fails() -> None:
        raise error

    with pytest.raises(error):
        fails()
    with pytest.raises(error), bf16(policy=UNIFIED):
        raise error
    assert (A @ A).dtype is FP32


def test_one_object_in_several_threads_at_once() -> None:
    shared = bf16(policy=UNIFIED)
    inside, leave = threading.Barrier(3, timeout=30), threading.Barrier(3, timeout=30)
    seen: list[torch.dtype] = []

    def work() -> None:
        before = (A @ A).dtype
        with shared:
            inside.wait()
            during = (A @ A).dtype
            leave.wait()
        seen.extend([before, during, (A @ A).dtype])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert (A @ A).dtype is FP32  # the region belongs to the threads that entered it
    leave.wait()
    for thread in threads:
        thread.join()
    assert seen == [FP32, BF16, FP32] * 2


def test_decorator_keeps_the_function() -> None:
    @bf16(policy=UNIFIED)
    def product(a: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        """Doc."""
        return (a @ a) * power

    assert product.__name__ == "product"
    assert product.__doc__ == "Doc."
    assert product(A, power=2).dtype is BF16
    with pytest.raises(TypeError, match="decorates a function, got Tensor"):
        bf16(policy=UNIFIED)(A)  # type: ignore[arg-type]


def test_copies_and_pickles_of_a_region_start_outside() -> None:
    region = bf16(policy=UNIFIED)
    with region:
        twins = [copy.deepcopy(region), pickle.loads(pickle.dumps(region)), copy.copy(region)]
    for twin in twins:
        assert (twin.device, twin.fast_dtype, twin.policy) == ("cpu", BF16, UNIFIED)
        with twin:
            assert (A @ A).dtype is BF16
        assert (A @ A).dtype is FP32


@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
def test_the_torch_policy_is_torch_autocast_bit_for_bit(low: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )
    x, y = torch.randn(8, 16), torch.randint(4, (8,))

    def run(region: Callable[[], object]) -> list[torch.Tensor]:
        model.zero_grad()
        with region():  # type: ignore[attr-defined]
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    ours = run(lambda: fp.autocast("cpu", dtype=low, policy="torch"))
    torchs = run(lambda: torch.autocast("cpu", dtype=low))
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.trouble("T114")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_the_same_precision(reentrant: bool) -> None:
    """Run in a fresh process, where one policy is in use: with several it is an error (next test)."""
    script = f"""
import warnings, torch, floatplan as fp
from torch.utils.checkpoint import checkpoint
warnings.simplefilter("error")
seen = []
w = torch.randn(4, 4, requires_grad=True)
def block(x):
    y = torch.exp((x @ w) * 0.1)
    seen.append(((x @ w).dtype, y.dtype))
    return y * y  # a saved tensor past the check, so that the recomputation reaches it
x = torch.randn(2, 4, requires_grad=True)
with fp.autocast("cpu", dtype=torch.bfloat16, policy=fp.Policy.unified(slow_kernels=True)):
    loss = checkpoint(block, x, use_reentrant={reentrant}).sum()
loss.backward()
assert seen == [(torch.bfloat16, torch.float32)] * 2, seen
with fp.autocast("cpu", dtype=torch.bfloat16, policy=fp.Policy.unified(slow_kernels=True)):
    y = checkpoint(lambda t: torch.exp(t @ w), x, use_reentrant={reentrant})
if not {reentrant}:  # read outside of a backward
    assert y.grad_fn._saved_result.dtype is torch.float32
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = checkpoint(block, x, use_reentrant={reentrant}).sum()
loss.backward()
assert seen[2:] == [(torch.bfloat16, torch.bfloat16)] * 2, seen
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_recomputation_among_several_policies_is_an_error_that_says_so() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with bf16(policy=fp.Policy.torch("cuda")):
        torch.exp(x)
    with bf16(policy=UNIFIED):
        loss = checkpoint(lambda t: torch.exp(t @ A), x, use_reentrant=False).sum()
    with pytest.raises(RegionError, match="several policies"):
        loss.backward()


def test_a_region_inside_the_checkpointed_function_needs_no_guess() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    seen = []

    @bf16(policy=UNIFIED)
    def block(t: torch.Tensor) -> torch.Tensor:
        y = torch.exp(t @ A)
        seen.append(y.dtype)
        return y * y  # a saved tensor past the check, so that the recomputation reaches it

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen == [FP32, FP32]


@pytest.mark.trouble("T76")
def test_what_cannot_be_had_is_said() -> None:
    with pytest.warns(PrecisionWarning, match=r"disabled: torch.float64 is not a low-precision dtype"):
        region = fp.autocast("cpu", dtype=torch.float64)
    with region:
        assert (A @ A).dtype is FP32
    if not torch.cuda.is_available():
        with pytest.warns(PrecisionWarning, match="CUDA is not available here"):
            region = fp.autocast("cuda")
        with region:
            assert not torch.is_autocast_enabled("cuda")


@pytest.mark.trouble("T73")
def test_the_device_may_be_a_torch_device() -> None:
    with fp.autocast(torch.device("cpu", 0), dtype=BF16, policy=UNIFIED):
        assert (A @ A).dtype is BF16
    with fp.autocast("cpu:0", dtype=BF16, policy=UNIFIED):
        assert (A @ A).dtype is BF16


def test_bad_arguments_name_what_is_right() -> None:
    with pytest.raises(RegionError, match=r"device type 'cuad'; there are kernels for: cpu, cuda"):
        fp.autocast("cuad")
    with pytest.raises(RegionError, match=r"must be a string, a torch\.device or a tensor, got int"):
        fp.autocast(0)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match=r"must be a torch.dtype such as torch.bfloat16, got 'bf16'"):
        fp.autocast("cpu", dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="'unified', 'torch' or a Policy, got 'O1'"):
        bf16(policy="O1")
    with pytest.raises(
        PolicyError, match=r"torch knows no operator 'aten::linaer'; did you mean 'aten::linear'"
    ):
        bf16(policy=UNIFIED.with_ops(fp32=["aten::linaer"]))
    assert (A @ A).dtype is FP32


def test_default_dtype_is_torchs() -> None:
    assert bf16().fast_dtype is fp.autocast("cpu").fast_dtype is torch.get_autocast_dtype("cpu")


def test_an_operator_of_another_library_gets_a_class() -> None:
    lib = torch.library.Library("floatplan_test", "DEF")  # type: ignore[no-untyped-call]
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    twice = torch.ops.floatplan_test.twice
    with bf16(policy=UNIFIED.with_ops(fp32=["floatplan_test::twice"])):
        assert twice(A.bfloat16()).dtype is FP32
    with bf16(policy=UNIFIED.with_ops(lower=["floatplan_test::twice"])):
        assert twice(A).dtype is BF16
    with bf16(policy=UNIFIED):
        assert twice(A).dtype is FP32
    assert twice(A.bfloat16()).dtype is BF16
    lib._destroy()  # type: ignore[no-untyped-call]


def test_registration_says_nothing() -> None:
    """The one warning of torch about overridden kernels is ours to silence; others are not."""
    script = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, floatplan as fp
    with fp.autocast("cpu", dtype=torch.bfloat16, policy=fp.Policy.unified(slow_kernels=True)):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
assert not caught, [str(w.message) for w in caught]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "verrid" not in done.stderr


@pytest.mark.trouble("T66")
def test_backward_inside_threads_sees_the_forward_dtype() -> None:
    """Gradients flow in the formats that the forward chose, whatever thread runs the backward."""
    w = torch.randn(4, 4, requires_grad=True)
    with bf16(policy=UNIFIED):
        loss = (A @ w).sum()
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    assert w.grad is not None
    assert w.grad.dtype is FP32


def test_warnings_are_not_swallowed_inside_a_region() -> None:
    with bf16(policy=UNIFIED), pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", stacklevel=1)


def test_more_policies_than_torchs_state_holds_are_refused_and_nothing_is_entered() -> None:
    """In a process of its own, which has no policies left afterwards."""
    script = """
import torch, floatplan as fp
from floatplan import _torch
from floatplan.engine import cache, state
from floatplan.errors import RegionError
a = torch.randn(4, 4)
try:
    for number in range(100):
        policy = fp.Policy.unified(slow_kernels=True)
        policy = policy.with_ops(untouched=[name for name, _ in policy.rows[: number + 1]])
        with fp.autocast("cpu", dtype=torch.bfloat16, policy=policy):
            pass
except RegionError as error:
    assert "make policies once" in str(error), error
else:
    raise AssertionError("100 policies were taken")
assert number == len(_torch.CARRIER_VALUES)
assert len(state._thread.opened) == cache._local.copies.depth == 0
assert state.policies_in_force() == {} and cache._local.copies.since is None
assert (a @ a).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
