"""What the numbers of a tensor look like to number formats: a histogram, and what follows from it."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import cache

from floatplan.formats import FORMATS

WHAT_IF = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
"""Formats of interest."""
LEAST, MOST = -137, 127
"""Exponents that are told apart. Smaller ones, below all of 16 bits, count as float32's least, -149."""


@cache
def underflows_below(name: str) -> float:
    """What is nearer to 0 than this becomes 0 in a format, rounded to nearest, ties to even."""
    half = FORMATS[name].smallest_subnormal / 2
    return half * (1 + 2.0**-23) if half >= 2.0**-126 else half + 2.0**-149


@cache
def overflows_from(name: str) -> float:
    """From this on, a number does not fit a format, rounded to nearest, ties to even.

    (Torch stores the largest number of ``fp8_e4m3``, which has no infinity, in place of a larger one.)
    """
    format = FORMATS[name]
    spacing = 2.0 ** (math.frexp(format.max)[1] - 1 - format.mantissa_bits)
    # Of fp8_e4m3 the largest number is even, so that the tie goes down; of the others it goes up to inf.
    limit = format.max + spacing / 2
    return limit if format.has_inf else limit + 2.0 ** (math.frexp(limit)[1] - 24)


@cache
def boundaries() -> tuple[float, ...]:
    """Magnitudes, in ascending order, at which the bins of a histogram begin; all are float32 numbers."""
    powers = {2.0**-149, *(2.0**exponent for exponent in range(LEAST, MOST + 1))}
    limits = {limit for name in WHAT_IF for limit in (underflows_below(name), overflows_from(name))}
    return (*sorted(powers | limits), math.inf)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one tensor, or of several: of large ones, of an even sample.

    Attributes:
        bins: how many lie in each bin: below the first of `boundaries`, that is 0; between two of them; and,
            last, those that are not finite.
        largest: magnitude of the largest finite one, of all where they are all finite.
        size: how many there are; 0 stands for as many as are counted.
        is_finite: whether all are, counted or not.
    """

    bins: tuple[int, ...]
    largest: float
    size: int = 0
    is_finite: bool = True

    @property
    def count(self) -> int:
        """How many are counted."""
        return sum(self.bins)

    @property
    def zeros(self) -> float:
        """Share of zeros, in [0, 1]."""
        return self._share(self.bins[0])

    @property
    def not_finite(self) -> float:
        """Share of inf and NaN; of a sample without any, that of one number if there are some elsewhere."""
        return self._share(self.bins[-1]) or (0.0 if self.is_finite else self._one())

    def underflow(self, name: str) -> float:
        """Share that is not 0 and would be in a format."""
        return self._share(sum(self.bins[1 : self._from(underflows_below(name))]))

    def overflow(self, name: str) -> float:
        """Share that is finite and would not be in a format; of a sample as `not_finite`."""
        above = self._share(sum(self.bins[self._from(overflows_from(name)) : -1]))
        return above or (self._one() if self.largest >= overflows_from(name) else 0.0)

    def exponents(self) -> dict[int, int]:
        """How many of the finite ones but 0 have each exponent, floor(log2(magnitude)); see `LEAST`."""
        found: dict[int, int] = {}
        for number, low in zip(self.bins[1:-1], boundaries(), strict=False):
            if number:
                exponent = math.frexp(low)[1] - 1
                found[exponent] = found.get(exponent, 0) + number
        return found

    def __add__(self, other: Numbers) -> Numbers:
        bins = tuple(one + more for one, more in zip(self.bins, other.bins, strict=True))
        size = (self.size or self.count) + (other.size or other.count)
        return Numbers(bins, max(self.largest, other.largest), size, self.is_finite and other.is_finite)

    def _one(self) -> float:
        return 1 / max(1, self.size, self.count)

    def _share(self, number: int) -> float:
        return number / self.count if self.count else 0.0

    @staticmethod
    def _from(limit: float) -> int:
        """The bin that begins with ``limit``."""
        return bisect.bisect_left(boundaries(), limit) + 1
