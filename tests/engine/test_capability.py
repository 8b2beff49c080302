"""The table of kernels that are not fast, and what it does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import floatplan as fp
from floatplan.engine import precision_notes, settings
from floatplan.engine.capability import Capability, slow_kernel
from floatplan.errors import PrecisionWarning
from floatplan.policy import Kind

BF16, FP16 = torch.bfloat16, torch.float16
OLD_CPU = Capability("cpu")
NEW_CPU = Capability("cpu", onednn_bf16=True, onednn_fp16=True)


@pytest.mark.parametrize(
    ("kind", "dtype", "has", "slow"),
    [
        (Kind.CONVOLUTION, FP16, NEW_CPU, True),
        (Kind.MATMUL, FP16, NEW_CPU, False),
        (Kind.MATMUL, FP16, OLD_CPU, True),
        (Kind.CONVOLUTION, BF16, NEW_CPU, False),
        (Kind.MATMUL, BF16, OLD_CPU, True),
        (Kind.OTHER, FP16, OLD_CPU, False),
        (Kind.MATMUL, BF16, Capability("cuda", compute_capability=(7, 5)), True),
        (Kind.MATMUL, BF16, Capability("cuda", compute_capability=(8, 0)), False),
        (Kind.CONVOLUTION, FP16, Capability("cuda", compute_capability=(7, 0)), False),
    ],
)
def test_the_table(kind: Kind, dtype: torch.dtype, has: Capability, slow: bool) -> None:
    assert (slow_kernel(kind, dtype, has) is not None) is slow


@pytest.mark.trouble("T101")
def test_an_fp16_convolution_on_a_cpu_stays_in_float32_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "_said", set())
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with pytest.warns(
        PrecisionWarning, match=r"convolutions stay in float32 in place of float16: no CPU has"
    ):
        inside = fp.autocast("cpu", dtype=FP16)
    with inside:
        result = F.conv2d(x, w)
        upcast = F.conv2d(x.half(), w.half())
    assert result.dtype is upcast.dtype is torch.float32
    assert torch.equal(result, F.conv2d(x, w))
    assert torch.equal(upcast, F.conv2d(x.half().float(), w.half().float()))
    fp.autocast("cpu", dtype=FP16)  # once is enough


def test_slow_kernels_run_when_asked_for() -> None:
    policy = fp.Policy.unified(slow_kernels=True)
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with fp.autocast("cpu", dtype=FP16, policy=policy):
        assert F.conv2d(x, w).dtype is FP16
    assert precision_notes("cpu", FP16, policy) == ()


def test_notes_are_sentences() -> None:
    notes = precision_notes("cpu", FP16)
    assert any(note.startswith("convolutions stay in float32 in place of float16: ") for note in notes)
