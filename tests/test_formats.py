"""Facts of the number formats against torch's own."""

from __future__ import annotations

import pytest
import torch

from floatplan.errors import PolicyError
from floatplan.formats import FORMATS, format_of


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.torch_name])
def test_facts_agree_with_torch(name: str) -> None:
    fmt = FORMATS[name]
    info = torch.finfo(getattr(torch, fmt.torch_name))
    assert (fmt.bits, fmt.max, fmt.smallest_normal, fmt.eps) == (info.bits, info.max, info.tiny, info.eps)
    smallest = torch.tensor(fmt.smallest_subnormal, dtype=torch.float64).to(getattr(torch, fmt.torch_name))
    assert smallest.double().item() == fmt.smallest_subnormal
    half = torch.tensor(fmt.smallest_subnormal / 2, dtype=torch.float64).to(getattr(torch, fmt.torch_name))
    assert half.double().item() == 0.0


def test_formats_are_found_by_any_usual_name() -> None:
    assert format_of("bf16") is format_of("bfloat16") is format_of(torch.bfloat16) is FORMATS["bf16"]
    assert format_of("half") is format_of(torch.half) is FORMATS["fp16"]
    with pytest.raises(PolicyError, match=r"no number format 'fp61'; did you mean .*'fp16'"):
        format_of("fp61")
