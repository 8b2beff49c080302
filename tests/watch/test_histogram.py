"""Histograms of numbers: every figure against NumPy and torch's own conversions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from floatplan.formats import FORMATS
from floatplan.records.numbers import LEAST, WHAT_IF, Numbers, boundaries, overflows_from, underflows_below
from floatplan.watch.histogram import (
    BINS,
    PENDING,
    SAMPLE,
    SMALL,
    Histograms,
    numbers_of,
    order_of,
    sample,
)

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
    return numbers_of(torch.tensor(values, dtype=torch.float32))


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
    exponents = [exponent if exponent >= LEAST else -149 for exponent in exponents]
    assert found.exponents() == {exponent: exponents.count(exponent) for exponent in exponents}


def test_boundaries_are_float32_numbers_in_order() -> None:
    limits = boundaries()
    assert list(limits) == sorted(set(limits))
    assert all(float(numpy.float32(limit)) == limit for limit in limits)
    assert limits[:2] == (2.0**-149, 2.0**LEAST)
    assert len(limits) + 1 == BINS


@given(st.lists(FLOAT32, max_size=10), st.lists(FLOAT32, max_size=10))
def test_sums_are_of_all_numbers(one: list[float], other: list[float]) -> None:
    assert numbers(one) + numbers(other) == numbers([*one, *other])


@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts(of: torch.dtype) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(of).t()[::2]
    found = numbers_of(tensor)
    assert found.count == 6
    assert found.largest == tensor.float().abs().max().item()


def test_nothing_has_no_shares() -> None:
    found = numbers_of(torch.zeros(0))
    assert (found.count, found.zeros, found.underflow("fp16"), found.largest) == (0, 0.0, 0.0, 0.0)
    assert Histograms().read() == {}


def counted(tensor: torch.Tensor) -> Numbers:
    """By NumPy, of the sample that is documented."""
    array = tensor.float().abs().numpy().ravel()
    step = -(-array.size // SAMPLE) or 1
    while step > 1 and math.gcd(step, array.size) > 1:
        step += 1
    with numpy.errstate(invalid="ignore"):  # a NaN of another pattern
        places = numpy.searchsorted(boundaries(), array[::step], "right")
    bins = numpy.bincount(numpy.where(numpy.isnan(array[::step]), BINS - 1, places), minlength=BINS)
    is_finite = bool(numpy.isfinite(array).all())
    among = array if is_finite else array[::step]
    largest = float(among[numpy.isfinite(among)].max(initial=0))
    return Numbers(tuple(bins.tolist()), largest, array.size, is_finite)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([0, 1, 7, SMALL, SMALL + 1, SAMPLE, SAMPLE + 1, 3 * 2**16]),
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        ),
        max_size=6,
    ),
    st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_many_tensors_together_count_as_each_alone(
    added: list[tuple[str, int, torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    histograms: Histograms[str] = Histograms()
    alone: dict[str, Numbers] = {}
    for key, size, of in added:
        powers = 2.0 ** torch.randint(-140, 120, (size,), generator=generator)
        values = (torch.randn(size, generator=generator) * powers).to(of)
        values[: size // 5] = math.inf if size % 2 else 1.0
        histograms.add(key, values.clone())
        one = counted(values)
        alone[key] = alone[key] + one if key in alone else one
    found = histograms.read()
    assert {key: replace(one, largest=0.0) for key, one in found.items()} == {
        key: replace(one, largest=0.0) for key, one in alone.items()
    }
    for key, one in found.items():
        # Where some is not finite, the largest of the others is that of the samples.
        assert one.largest == alone[key].largest or not one.is_finite


@pytest.mark.parametrize("shape", [(512, 1024), (700, 700), (3, 5, 7, 11, 401)])
def test_a_sample_prefers_no_row_and_no_column(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    indices = sample(torch.arange(tensor.numel()).reshape(shape), range(len(shape)))
    assert SAMPLE // 3 < len(indices) <= SAMPLE
    for size in shape:
        met = torch.bincount(indices % size, minlength=size)
        assert met.min() > 0.9 * len(indices) / size - 2
        assert met.max() < 1.1 * len(indices) / size + 2


def test_what_a_sample_misses_shows_if_it_is_large_or_not_finite() -> None:
    tensor = torch.ones(2**19)
    missed = next(place for place in range(9) if place not in sample(torch.arange(2**19), (0,))[:9].tolist())
    tensor[missed] = 70000.0
    found = numbers_of(tensor)
    assert (found.largest, found.size, found.is_finite) == (70000.0, 2**19, True)
    assert found.overflow("fp16") == 2**-19
    assert found.overflow("bf16") == found.not_finite == 0
    tensor[missed] = -math.inf
    found = numbers_of(tensor)
    assert (found.largest, found.is_finite, found.not_finite) == (1.0, False, 2**-19)


def test_elements_are_taken_in_the_order_of_memory() -> None:
    tensor = torch.randn(64, 33, 17, 19).to(memory_format=torch.channels_last)
    view = sample(tensor, order_of(tensor))
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_small_tensors_wait_in_bounded_memory() -> None:
    histograms: Histograms[int] = Histograms()
    for key in range(2 * PENDING // SMALL):
        histograms.add(key % 3, torch.full((SMALL,), 2.0**key))
    waiting = sum(values.numel() for _, values in histograms._pending[torch.device("cpu")])
    assert waiting <= PENDING
    assert sum(numbers.count for numbers in histograms.read().values()) == 2 * PENDING


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40))
@example([-1, 2**31 - 1, 0x7F800001, -0x400000, 0x7F800000])
def test_every_pattern_of_bits_is_counted(patterns: list[int]) -> None:
    tensor = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    assert numbers_of(tensor) == counted(tensor)


def test_complex_and_sparse_tensors() -> None:
    assert numbers_of(torch.tensor([3 + 4j])).exponents() == {1: 1, 2: 1}
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 5]]), torch.tensor([1.0, 8.0]), (9,), check_invariants=True
    )
    assert numbers_of(sparse).exponents() == {0: 1, 3: 1}


def test_what_is_counted_is_what_was_there() -> None:
    histograms: Histograms[str] = Histograms()
    tensor = torch.ones(10)
    histograms.add("x", tensor)
    tensor.zero_()
    assert histograms.read()["x"].exponents() == {0: 10}
