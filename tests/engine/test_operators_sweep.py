"""Every operator that torch tests, with inputs of every mix of dtypes, in a region of the unified policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import floatplan as fp

pytest.importorskip("expecttest", reason="torch.testing, where the operators are, imports it")
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

# The samples hold calls that torch warns about (beta operators, deprecated overloads); not our concern.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

UNIFIED = fp.Policy.unified(slow_kernels=True)
SAMPLES = 1
"""Samples of each operator. Eight of each take two minutes and found nothing that the first does not."""

HAS_NO_VALUE = ("empty", "new_empty", "rand", "normal", "uniform", "bernoulli", "cauchy", "exponential")
"""Operators (by the beginning of the name) whose results are random or not initialised."""

NOT_COMPARED = {"linalg.pinv.singular": "makes its singular matrix by a product, which is low"}
RAISES = {
    "_softmax_backward_data": "a backward, called by hand with another dtype than its forward had",
    "nn.functional.linear_cross_entropy": "a Python function that writes with out=, which no autocast sees",
}

MIXES = {
    "all float32": (torch.float32,),
    "all low": (None,),
    "low, then float32": (None, torch.float32),
    "float32, then low": (torch.float32, None),
    "low, float32, then low": (None, torch.float32, None),
}
"""Dtype of each floating-point tensor in turn; the last goes on. None is the low one."""


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def give(tree: Any, dtypes: list[torch.dtype]) -> Any:
    """A copy of the arguments, in which the floating-point tensors have these dtypes in turn."""
    left = list(dtypes)

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or value.dtype is torch.float64:
            return value.detach().clone()
        return value.detach().to(left.pop(0) if len(left) > 1 else left[0], copy=True)

    return tree_map(one, tree)


def call(op: OpInfo, tree: Any) -> list[Tensor] | None:
    """The tensors that come out, or nothing if it raises."""
    torch.manual_seed(1)
    first, args, kwargs = tree
    try:
        return [leaf for leaf in tree_leaves(op(first, *args, **kwargs)) if isinstance(leaf, Tensor)]
    except (RuntimeError, TypeError, ValueError):
        return None


def units(result: Tensor, exact: Tensor, low: torch.dtype) -> float:
    """The largest error in units of ``low``, relative to the largest value."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    mine, theirs = result.to(wide), exact.to(wide)
    finite = theirs.isfinite()
    if not bool(finite.any()):
        return 0.0
    error = (mine - theirs).abs()[finite]
    if not bool(error.isfinite().all()):
        return float("inf")
    return (error.max() / theirs.abs()[finite].max().clamp(min=1e-30)).item() / torch.finfo(low).eps


def faults(op: OpInfo, low: torch.dtype, counts: Counter[str]) -> list[str]:
    found = []
    name = name_of(op)
    samples = [sample for sample, _ in zip(op.sample_inputs("cpu", torch.float32), range(SAMPLES))]  # noqa: B905
    for sample in samples:
        tree = (sample.input, sample.args, sample.kwargs)
        several = sum(map(is_real, tree_leaves(tree))) > 1
        for mix, formats in MIXES.items():
            if len(formats) > 1 and not several:
                continue
            dtypes = [dtype or low for dtype in formats]
            exact = call(op, give(give(tree, dtypes), [torch.float32]))
            if exact is None:
                continue
            counts["calls"] += 1
            with fp.autocast("cpu", dtype=low, policy=UNIFIED):
                mine = call(op, give(tree, dtypes))
            if mine is None:
                outside = call(op, give(tree, dtypes))
                counts["raise"] += 1
                if outside is not None or not name.startswith(tuple(RAISES)):
                    found.append(f"{name}: raises for {mix}" + (", only in a region" if outside else ""))
                continue
            if len(formats) > 1 or name.startswith(HAS_NO_VALUE) or name in NOT_COMPARED:
                continue
            for result, wanted in zip(mine, exact, strict=True):
                comparable = result.layout is wanted.layout is torch.strided and result.shape == wanted.shape
                if comparable and (is_real(wanted) or wanted.is_complex()):
                    counts["values"] += 1
                    if (error := units(result, wanted, low)) > 8:
                        found.append(f"{name}: {error:.0f} units off for {mix}")
    return found


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_no_operator_raises_for_any_mix_of_dtypes(low: torch.dtype, figure: Callable[[str], None]) -> None:
    counts: Counter[str] = Counter()
    operators = [op for op in op_db if torch.float32 in op.dtypes and not op.name.startswith("jiterator")]
    wrong = [line for op in operators for line in faults(op, low, counts)]
    figure(
        f"sweep over {len(operators)} operators, {low}: {counts['calls']} calls, {counts['values']} results "
        f"compared, {counts['raise']} raise as they do outside of a region"
    )
    assert not wrong, "\n".join(wrong)
