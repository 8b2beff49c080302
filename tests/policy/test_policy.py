"""The operator table and the `Policy` value."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from floatplan import Policy
from floatplan.errors import PolicyError
from floatplan.policy import OPERATORS, TORCH_TABLES, Kind, OpClass, operators

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}
COUNTS = {"cpu": 127, "cuda": 119, "xpu": 117, "mps": 95}
"""Operators at each key in torch 2.13."""

IS_2_13 = torch.__version__.startswith("2.13")


@functools.cache
def registered() -> dict[str, set[str]]:
    """What torch registers at its autocast keys: readable without the devices, before ours are placed."""
    script = (
        "import torch\n"
        "of_key = torch._C._dispatch_get_registrations_for_dispatch_key\n"
        f"for key in {list(KEYS.values())}: print(*of_key(key))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    return {device: set(line.split()) for device, line in zip(KEYS, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("device_type", TORCH_TABLES)
def test_the_table_has_torchs_operators_and_no_others(
    device_type: str, figure: Callable[[str], None]
) -> None:
    theirs = registered()[device_type]
    rows = {name for name, row in OPERATORS.items() if device_type in row.torch}
    assert rows == set(dict(Policy.torch(device_type).rows))
    if IS_2_13:
        assert rows == theirs
        assert len(theirs) == COUNTS[device_type]
    assert rows & theirs
    figure(f"operators at {KEYS[device_type]}: {len(theirs)}, of which the table has {len(rows & theirs)}")


def test_every_row_has_a_class_or_a_reason_to_be_left_alone(figure: Callable[[str], None]) -> None:
    counts = Counter("left alone" if row.unified is None else row.unified.value for row in OPERATORS.values())
    for row in OPERATORS.values():
        assert len(row.why) > 15, row
        assert row.unified is not None or "left alone" in row.why, row
        assert set(row.torch) <= set(TORCH_TABLES), row
    nobodys = sum(not row.torch for row in OPERATORS.values())
    said = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    figure(f"operator table: {len(OPERATORS)} rows ({said}), {nobodys} of them in no table of torch")


def test_the_tables_of_cuda_xpu_and_mps_agree_where_they_overlap() -> None:
    """XPU's is CUDA's without cuDNN; MPS's lacks some operators and has two of its own."""
    cuda, xpu, mps = (dict(Policy.torch(device).rows) for device in ("cuda", "xpu", "mps"))
    assert set(cuda) - set(xpu) == {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose"}
    assert xpu.items() <= cuda.items()
    assert set(mps) - set(cuda) == {"aten::_mps_convolution", "aten::batch_norm"}
    differ = {name for name in set(mps) & set(cuda) if mps[name] is not cuda[name]}
    assert differ == {"aten::conv_transpose3d.input"}


def test_every_row_names_an_operator_of_this_torch() -> None:
    """On an older torch, rows of newer operators are skipped."""
    known = set(torch._C._dispatch_get_all_op_names())
    unknown = [name for name in OPERATORS if name not in known]
    assert not IS_2_13 or unknown == []


def test_products_are_the_lower_class() -> None:
    assert OPERATORS["aten::einsum"].unified is None  # the product inside of it is
    for row in OPERATORS.values():
        if row.kind is not Kind.OTHER and row.name != "aten::einsum":
            assert row.unified is OpClass.LOWER, row


def test_a_second_row_names_the_first_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    again = operators.Group("again", OpClass.FP32, {}, "linear")
    monkeypatch.setattr(operators, "GROUPS", (*operators.GROUPS, again))
    with pytest.raises(PolicyError, match=r"two rows for aten::linear: 'matrix product.*' and 'again'"):
        list(operators._rows())


def test_policies_are_values() -> None:
    assert Policy.unified() == Policy.unified()
    assert Policy.unified() != Policy.unified(slow_kernels=True)
    changed = Policy.unified().with_ops(fp32=["aten::linear"])
    assert changed == Policy.unified().with_ops(fp32="aten::linear")
    assert hash(changed) == hash(Policy.unified().with_ops(fp32=["aten::linear"]))
    assert changed.fingerprint != Policy.unified().fingerprint
    assert pickle.loads(pickle.dumps(changed)) == changed
    with pytest.raises(AttributeError):
        changed.name = "x"  # type: ignore[misc]


def test_with_ops_reaches_all_overloads_or_one() -> None:
    policy = Policy.unified()
    assert policy.class_of("aten::pow.Scalar") is OpClass.FP32
    assert policy.with_ops(lower=["aten::pow"]).class_of("aten::pow.Scalar") is OpClass.LOWER
    one = policy.with_ops(untouched=["aten::pow.Scalar"])
    assert one.class_of("aten::pow.Scalar") is None
    assert one.class_of("aten::pow.Tensor_Scalar") is OpClass.FP32
    later = one.with_ops(widest=["aten::pow"])
    assert later.class_of("aten::pow.Scalar") is OpClass.WIDEST
    assert policy.class_of("aten::relu") is None
    assert policy.with_ops(fp32=["mylib::my_op"]).class_of("mylib::my_op.fast") is OpClass.FP32


def test_a_changed_torch_policy_is_no_longer_torchs_own() -> None:
    policy = Policy.torch("cpu")
    assert policy.native_device == "cpu"
    assert policy.with_ops(fp32=["aten::linear"]).native_device == ""


def test_bad_names_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"'linear' has no namespace; .* did you mean 'aten::linear'"):
        Policy.unified().with_ops(fp32=["linear"])
    with pytest.raises(PolicyError, match=r"'liner' has no namespace; .* did you mean 'aten::linear'"):
        Policy.unified().with_ops(fp32=["liner"])
    with pytest.raises(PolicyError, match="aten::mm is given two classes, lower and fp32; keep one"):
        Policy.unified().with_ops(fp32=["aten::mm"], lower=["aten::mm"])
    with pytest.raises(
        PolicyError, match="an operator is named by a string such as 'aten::linear', got None"
    ):
        Policy.unified().with_ops(fp32=[None])  # type: ignore[list-item]
    with pytest.raises(PolicyError, match=r"no torch table for device type 'cud'; did you mean 'cuda'"):
        Policy.torch("cud")


def test_the_room_needs_no_torch() -> None:
    script = (
        "import sys, floatplan, floatplan.policy, floatplan.formats, floatplan.records; "
        "floatplan.Policy.unified().fingerprint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
