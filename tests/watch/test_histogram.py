"""Histograms of numbers: every figure against NumPy and torch's own conversions."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floatplan.formats import FORMATS
from floatplan.records.numbers import LEAST, WHAT_IF, Numbers, boundaries, overflows_from, underflows_below
from floatplan.watch.histogram import BINS, histogram, read

FLOAT32 = st.floats(width=32)
EDGES = sorted(
    {
        float(numpy.nextafter(numpy.float32(limit), numpy.float32(way)))
        for name in WHAT_IF
        for limit in (
            underflows_below(name),
            overflows_from(name),
            FORMATS[name].max,
            FORMATS[name].smallest_subnormal,
        )
        for way in (0.0, limit, math.inf)
    }
)


def numbers(values: list[float]) -> Numbers:
    return read([histogram(torch.tensor(values, dtype=torch.float32))])[0]


def dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, FORMATS[name].torch_name)
    return found


@given(st.lists(FLOAT32 | st.sampled_from(EDGES), min_size=1, max_size=40))
def test_every_figure_against_numpy_and_torch(values: list[float]) -> None:
    found = numbers(values)
    array = numpy.array(values, dtype=numpy.float32)
    finite = array[numpy.isfinite(array)]
    assert found.count == len(array)
    assert found.zeros == numpy.mean(array == 0)
    assert found.not_finite == (len(array) - len(finite)) / len(array)
    assert found.largest == (numpy.abs(finite).max() if len(finite) else 0)
    for name in WHAT_IF:
        rounded = torch.tensor(values, dtype=torch.float32).to(dtype(name)).float().numpy()
        assert found.underflow(name) == numpy.mean((rounded == 0) & (array != 0)), name
        # What torch stores where a number does not fit this format is its largest number.
        fits = numpy.abs(array) <= 464 if name == "fp8_e4m3" else numpy.isfinite(rounded)
        assert found.overflow(name) == numpy.mean(~fits & numpy.isfinite(array)), name
    with numpy.errstate(divide="ignore"):
        exponents = [math.frexp(abs(float(value)))[1] - 1 for value in finite if value != 0]
    assert found.exponents() == {exponent: exponents.count(exponent) for exponent in exponents}


def test_boundaries_are_float32_numbers_in_order() -> None:
    limits = boundaries()
    assert list(limits) == sorted(set(limits))
    assert all(float(numpy.float32(limit)) == limit for limit in limits)
    assert limits[0] == 2.0**LEAST
    assert len(limits) + 1 == BINS


@given(st.lists(FLOAT32, max_size=10), st.lists(FLOAT32, max_size=10))
def test_sums_are_of_all_numbers(one: list[float], other: list[float]) -> None:
    assert numbers(one) + numbers(other) == numbers([*one, *other])


@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts(of: torch.dtype) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(of).t()[::2]
    (found,) = read([histogram(tensor)])
    assert found.count == 6
    assert found.largest == tensor.float().abs().max().item()


def test_nothing_has_no_shares() -> None:
    (found,) = read([histogram(torch.zeros(0))])
    assert (found.count, found.zeros, found.underflow("fp16"), found.largest) == (0, 0.0, 0.0, 0.0)
    assert read([]) == []
