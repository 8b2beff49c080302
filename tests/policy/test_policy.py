"""The operator table and the `Policy` value."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from floatplan import Policy
from floatplan.errors import PolicyError
from floatplan.policy import OPERATORS, Kind, OpClass, operators


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_table_has_torchs_operators_and_no_others(device_type: str) -> None:
    """What torch registers at its autocast key is readable without the device, before ours are placed."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device_type]
    script = f"import torch; print(*torch._C._dispatch_get_registrations_for_dispatch_key({key!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    registered = set(done.stdout.split())
    rows = {name for name, row in OPERATORS.items() if getattr(row, f"torch_{device_type}") is not None}
    if torch.__version__.startswith("2.13"):
        assert rows == registered
    assert rows & registered


def test_every_row_names_an_operator_of_this_torch() -> None:
    known = set(torch._C._dispatch_get_all_op_names())
    assert [name for name in OPERATORS if name not in known] == []


def test_products_are_the_lower_class() -> None:
    for row in OPERATORS.values():
        if row.kind is not Kind.OTHER:
            assert row.unified is OpClass.LOWER, row


def test_a_second_row_names_the_first_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    again = operators.Group("again", OpClass.FP32, None, None, "linear")
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
