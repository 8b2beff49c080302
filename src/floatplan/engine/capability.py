"""Which low-precision operators have a fast kernel on a device.

A static table, settled by measurement, of what is *not* fast: such an operator stays in float32, forward and
backward, whatever the grad mode, so that a recomputed forward sees the precision of the first one.
Slower by a small factor does not count; the table lists kernels that are plain loops or emulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from floatplan import _torch
from floatplan.policy import Kind, Policy

PRODUCTS = (Kind.MATMUL, Kind.CONVOLUTION)


@dataclass(frozen=True)
class Capability:
    """What a device has, as far as the table asks.

    Attributes:
        device_type: "cpu" or "cuda".
        onednn_bf16: the CPU's optimised kernels take bfloat16.
        onednn_fp16: the CPU's optimised kernels take float16.
        emulates_bf16: they do so by float32 instructions, for want of others.
        compute_capability: of the CUDA device, (0, 0) elsewhere.
    """

    device_type: str
    onednn_bf16: bool = False
    onednn_fp16: bool = False
    emulates_bf16: bool = False
    compute_capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Slow:
    """A row of the table: the operators and the format that have no fast kernel, when, and why."""

    device_type: str
    dtype: torch.dtype
    kinds: tuple[Kind, ...]
    when: Callable[[Capability], bool]
    why: str


SLOW_KERNELS: tuple[Slow, ...] = (
    Slow(
        "cpu",
        torch.float16,
        (Kind.CONVOLUTION,),
        lambda has: True,
        "no CPU has a fast fp16 kernel for a convolution's backward (elsewhere 66 times float32's time)",
    ),
    Slow(
        "cpu",
        torch.float16,
        (Kind.MATMUL,),
        lambda has: not has.onednn_fp16,
        "this CPU has no fp16 instructions that a fast kernel uses (elsewhere 200 times float32's time)",
    ),
    Slow(
        "cpu",
        torch.bfloat16,
        PRODUCTS,
        lambda has: not has.onednn_bf16,
        "this CPU's fast kernels do not take bf16, which leaves a plain loop",
    ),
    Slow(
        "cuda",
        torch.bfloat16,
        PRODUCTS,
        lambda has: has.compute_capability < (8, 0),
        "GPUs before compute capability 8.0 emulate bf16",
    ),
)


@cache
def capability_of(device_type: str) -> Capability:
    """What this machine's devices of ``device_type`` have; of several CUDA devices, the least."""
    if device_type == "cpu":
        return Capability(
            "cpu",
            onednn_bf16=_torch.onednn_runs(torch.bfloat16),
            onednn_fp16=_torch.onednn_runs(torch.float16),
            emulates_bf16=_torch.lacks_bf16_instructions(),
        )
    if device_type == "cuda" and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        return Capability("cuda", compute_capability=min(map(torch.cuda.get_device_capability, devices)))
    # A device that is not here runs nothing; the best case keeps what its table says visible in traces.
    return Capability(device_type, True, True, compute_capability=(99, 0))


def slow_kernel(kind: Kind, dtype: torch.dtype, has: Capability) -> str | None:
    """Why operators of ``kind`` have no fast kernel in ``dtype`` on a device, or ``None`` if they have."""
    for row in SLOW_KERNELS:
        if row.device_type == has.device_type and row.dtype == dtype and kind in row.kinds and row.when(has):
            return row.why
    return None


def precision_notes(device_type: str, dtype: torch.dtype, policy: Policy | None = None) -> tuple[str, ...]:
    """What a region of ``dtype`` keeps in float32 for want of a fast kernel: a sentence for each kind.

    Args:
        device_type: "cpu" or "cuda".
        dtype: the region's dtype.
        policy: the region's policy; the unified one by default. One with ``slow_kernels`` keeps nothing.
    """
    if policy is not None and policy.slow_kernels:
        return ()
    plural = {Kind.MATMUL: "matrix products", Kind.CONVOLUTION: "convolutions"}
    has = capability_of(device_type)
    return tuple(
        f"{plural[kind]} stay in float32 in place of {str(dtype).removeprefix('torch.')}: {why}"
        for kind in PRODUCTS
        if (why := slow_kernel(kind, dtype, has)) is not None
    )


@dataclass(frozen=True)
class StraightLimits:
    """Which linear layers compute the gradient of their weight as a float32 product (`weight_gradient`).

    Attributes:
        rows: at most so many in the input.
        elements: at least so many in the weight.
    """

    rows: int
    elements: int


def straight_limits(dtype: torch.dtype, has: Capability) -> StraightLimits | None:
    """The limits for products of ``dtype`` on a device; ``None`` where it never pays.

    With 16-bit products by matrix units (AMX, 2 cores) a weight of 1024 x 1024 took 0.3 of the time with 16
    rows, as long with 64, and 2 to 3 times as long above 256. On one core without such units, against a
    16-bit product that costs nothing: 0.6 with 16 rows and 0.95 with 32. Against the emulated product of
    such a CPU: 0.2, whatever the rows; what it costs in Python, 30 us, is gained from 2**17 elements on.
    CUDA has not been measured.
    """
    if has.device_type != "cpu":
        return None
    if dtype is torch.bfloat16 and has.emulates_bf16:
        return StraightLimits(rows=2**62, elements=2**17)
    return StraightLimits(rows=32, elements=2**20)
