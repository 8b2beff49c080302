"""Facts of each number format. Needs no torch.

Values follow from the bit layout (sign, exponent and mantissa bits) by IEEE 754-2019 section 3.3;
``fp8_e4m3`` and ``fp8_e5m2`` follow Micikevicius et al., "FP8 formats for deep learning" (2022), where
E4M3 gives up infinities to reach 448.
"""

from __future__ import annotations

from dataclasses import dataclass

from floatplan.errors import PolicyError, nearest


@dataclass(frozen=True)
class Format:
    """One binary floating-point format.

    Attributes:
        name: short name used in options, plans and reports.
        torch_name: attribute of ``torch`` that is its dtype, or ``""`` where torch stores none (tf32).
        bits: bits of storage.
        exponent_bits: bits of exponent.
        mantissa_bits: explicit bits of mantissa (without the implied one).
        has_inf: whether the format encodes infinities.
    """

    name: str
    torch_name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = True

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        if self.has_inf:
            return float((2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias)
        # Without infinities the top exponent holds numbers; only the all-ones mantissa is NaN.
        return float((2.0 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1))

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return float(self.smallest_normal * 2.0**-self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa_bits)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("fp64", "float64", 64, 11, 52),
        Format("fp32", "float32", 32, 8, 23),
        Format("tf32", "", 32, 8, 10),
        Format("bf16", "bfloat16", 16, 8, 7),
        Format("fp16", "float16", 16, 5, 10),
        Format("fp8_e5m2", "float8_e5m2", 8, 5, 2),
        Format("fp8_e4m3", "float8_e4m3fn", 8, 4, 3, has_inf=False),
    )
}

_BY_TORCH_NAME = {fmt.torch_name: fmt for fmt in FORMATS.values() if fmt.torch_name}


def format_of(name: object) -> Format:
    """The format called ``name``.

    Args:
        name: a short name (``"bf16"``), a torch name (``"bfloat16"``) or a ``torch.dtype``.

    Raises:
        PolicyError: no such format; lists the nearest names.
    """
    text = str(name).removeprefix("torch.")
    text = {"half": "float16", "float": "float32", "double": "float64"}.get(text, text)
    found = FORMATS.get(text) or _BY_TORCH_NAME.get(text)
    if found is None:
        known = [*FORMATS, *_BY_TORCH_NAME]
        raise PolicyError(
            f"no number format {text!r}{nearest(text, known) or '; known: ' + ', '.join(FORMATS)}"
        )
    return found
