"""Torch's own operator lists, which torch tests its autocast with, run through our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import floatplan as fp

pytest.importorskip("expecttest", reason="torch.testing, where the lists are, imports it")
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

# The lists hold calls whose arguments torch warns about (reductions, mixed weights); not our concern.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUDNN = ("cudnn_convolution", "cudnn_convolution_transpose")


@dataclass
class Entry:
    """One entry of torch's lists: an operator, its arguments, and the dtype that torch expects."""

    op: str
    args: tuple[Any, ...]
    run_as: torch.dtype | None
    expected: torch.dtype
    module: Any = torch
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, args: tuple[Any, ...], *, method: bool) -> Any:
        if method:
            return getattr(args[0], self.op)(*args[1:], **self.kwargs)
        return getattr(self.module, self.op)(*args, **self.kwargs)

    def forms(self) -> list[bool]:
        """The ways to call it that exist: as a function of the module (False), as a method (True)."""
        found = [False] if self.module is not None and hasattr(self.module, self.op) else []
        first = self.args[0]
        if isinstance(first, torch.Tensor) and hasattr(torch.Tensor, self.op):
            found.append(True)
        return found


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Iterable):
        return type(value)(cast(item, dtype) for item in value)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for item in value for found in tensors(item)] if isinstance(value, (list, tuple)) else []


def cpu_entries(low: torch.dtype) -> Iterator[Entry]:
    lists = AutocastCPUTestLists(torch.device("cpu"))
    column = 1 if low is torch.bfloat16 else 2
    for row in lists.torch_expect_builtin_promote:
        yield Entry(row[0], row[column], None, row[3])
    for row in lists.methods_expect_builtin_promote:
        yield Entry(row[0], row[column], None, row[3], module=None)
    for row in lists.torch_need_autocast_promote:
        yield Entry(row[0], row[column], torch.float32, torch.float32)
    for name, run_as, module in (
        ("torch_16", low, torch),
        ("torch_fp32", torch.float32, torch),
        ("nn_16", low, torch._C._nn),
        ("nn_fp32", torch.float32, torch._C._nn),
    ):
        for row in getattr(lists, name):
            yield Entry(row[0], row[1], run_as, run_as, module, row[2] if len(row) > 2 else {})


def cuda_entries(low: torch.dtype) -> Iterator[Entry]:
    lists = AutocastTestLists(torch.device("cpu"))

    def native(args: tuple[Any, ...]) -> Any:
        # The lists write 16-bit inputs as float16; in a bfloat16 region they are bfloat16.
        return tuple(
            native(item)
            if isinstance(item, tuple)
            else item.to(low)
            if isinstance(item, torch.Tensor) and item.dtype is torch.float16
            else item
            for item in args
        )

    for name, module in (("torch_expect_builtin_promote", torch), ("methods_expect_builtin_promote", None)):
        for op, args, expected in getattr(lists, name):
            yield Entry(op, native(args), None, expected, module)
    for row in lists.torch_need_autocast_promote:
        yield Entry(row[0], native(row[1]), torch.float32, torch.float32)
    for name, run_as, module in (
        ("torch_fp16", low, torch),
        ("torch_fp32", torch.float32, torch),
        ("nn_fp16", low, torch._C._nn),
        ("nn_fp32", torch.float32, torch._C._nn),
        ("linalg_fp16", low, torch._C._linalg),
        ("methods_fp16", low, None),
        ("methods_fp32", torch.float32, None),
    ):
        for row in getattr(lists, name):
            if row[0] == "einsum":
                # Torch's entry gives 2-D operands to a 4-D equation (and torch's own test skips it).
                operands = (torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5))
                yield Entry(row[0], (row[1], operands[0], operands[1]), run_as, run_as)
                continue
            kwargs = row[2] if len(row) > 2 and isinstance(row[2], dict) else {}
            yield Entry(row[0], native(row[1]), run_as, run_as, module, kwargs)


def check(
    entry: Entry, low: torch.dtype, policy: fp.Policy, control: Callable[[Entry, bool], Any]
) -> list[str]:
    """Run every form of an entry under ``policy``; what differs from torch."""
    wrong = []
    forms = entry.forms()
    if not forms:
        return [f"{entry.op}: neither a function nor a method"]
    for method in forms:
        with fp.autocast("cpu", dtype=low, policy=policy):
            got = entry.call(entry.args, method=method)
        wanted = control(entry, method)
        if type(got) is not type(wanted):
            wrong.append(f"{entry.op}: {type(got)} in place of {type(wanted)}")
        if not isinstance(got, (torch.Tensor, list, tuple)):
            if got != wanted:
                wrong.append(f"{entry.op}: {got} in place of {wanted}")
            continue
        for mine, theirs in zip(tensors(got), tensors(wanted), strict=True):
            if mine.dtype is not entry.expected:
                wrong.append(f"{entry.op}: {mine.dtype}, torch's list expects {entry.expected}")
            if mine.dtype is not theirs.dtype or not torch.equal(mine, theirs):
                wrong.append(f"{entry.op}: value differs from torch's ({mine.dtype}, {theirs.dtype})")
    return wrong


def by_hand(entry: Entry, method: bool) -> Any:
    """What torch computes when the inputs are cast by hand, with autocast off."""
    return entry.call(cast(entry.args, entry.run_as), method=method)


LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["torch's kernels", "our kernels"])
def test_cpu_lists(low: torch.dtype, native: bool, figure: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    policy = fp.Policy.torch("cpu")
    if not native:
        policy = replace(policy, native_device="")

    def as_torch(entry: Entry, method: bool) -> Any:
        with torch.autocast("cpu", dtype=low):
            return entry.call(entry.args, method=method)

    entries = list(cpu_entries(low))
    wrong = [line for entry in entries for line in check(entry, low, policy, as_torch)]
    which = "torch's kernels" if native else "our kernels"
    figure(f"AutocastCPUTestLists, {low}, Policy.torch('cpu') by {which}: {len(entries)} checked, 0 left out")
    assert not wrong, "\n".join(wrong)
    assert len(entries) > 50


@pytest.mark.parametrize("low", LOW, ids=str)
def test_cuda_lists_on_cpu_tensors(low: torch.dtype, figure: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    policy = fp.Policy.torch("cuda")
    entries = list(cuda_entries(low))
    checked = [entry for entry in entries if entry.op not in CUDNN]
    left_out = [entry.op for entry in entries if entry.op in CUDNN]
    wrong = [line for entry in checked for line in check(entry, low, policy, by_hand)]
    banned = AutocastTestLists(torch.device("cpu")).banned
    for op, args, module in banned:
        with fp.autocast("cpu", dtype=low, policy=policy), pytest.raises(RuntimeError, match="refused by"):
            getattr(module, op)(*args)
    figure(
        f"AutocastTestLists, {low}, Policy.torch('cuda') on CPU tensors: "
        f"{len(checked) + len(banned)} checked "
        f"(einsum with operands that fit its equation), {len(left_out)} left out "
        f"({', '.join(left_out)}: cuDNN is not on a CPU)"
    )
    assert not wrong, "\n".join(wrong)
    assert left_out == list(CUDNN)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_plain_torch_autocast_stays_bit_equal(low: torch.dtype) -> None:
    """After our kernels are in place, ``torch.autocast`` computes what torch's do when cast by hand."""
    with fp.autocast("cpu", dtype=torch.bfloat16):
        torch.exp(torch.ones(2))
    for entry in cpu_entries(low):
        if entry.run_as is None:
            continue
        for method in entry.forms():
            with torch.autocast("cpu", dtype=low):
                got = entry.call(entry.args, method=method)
            for mine, theirs in zip(tensors(got), tensors(by_hand(entry, method)), strict=True):
                assert mine.dtype is theirs.dtype is entry.expected, entry.op
                assert torch.equal(mine, theirs), entry.op
