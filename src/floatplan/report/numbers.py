"""Numbers as people read them. A missing one is a dash."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from floatplan.report.summary import RowSummary, Spread

Form: TypeAlias = Callable[[float], str]
MISSING = "-"
COLUMNS = ("row", "s / epoch", "examples / s", "vs fp32", "memory", "loss", "accuracy", "skipped", "scale")


def table_row(summary: RowSummary) -> tuple[str, ...]:
    """The cells of one row, in the order of ``COLUMNS``."""
    return (
        summary.row,
        with_spread(summary.seconds_per_epoch, significant),
        with_spread(summary.images_per_second, whole),
        with_spread(summary.speed, ratio),
        memory(summary.peak_memory.mean) if summary.peak_memory else MISSING,
        with_spread(summary.train_loss, significant),
        with_spread(summary.test_accuracy, percent),
        with_spread(summary.skipped_steps, count),
        count(summary.final_scale.mean) if summary.final_scale else MISSING,
    )


def with_spread(spread: Spread | None, form: Form) -> str:
    """``mean`` or ``mean ± deviation``, with the unit last."""
    if spread is None:
        return MISSING
    if spread.deviation is None:
        return form(spread.mean)
    number, *unit = form(spread.mean).split(" ")
    return " ".join([number, "±", form(spread.deviation).split(" ")[0], *unit])


def significant(value: float) -> str:
    """Three digits that count, without an exponent where that stays short."""
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 1e-4 or abs(value) >= 1e6:
        return f"{value:.2e}"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def whole(value: float) -> str:
    """No decimals."""
    return f"{value:,.0f}"


def count(value: float) -> str:
    """No decimals unless a mean, or a scale below 1, needs them."""
    return f"{value:,.0f}" if value == round(value) else significant(value)


def ratio(value: float) -> str:
    """``1.23 x``."""
    return f"{value:.2f} x"


def percent(value: float) -> str:
    """Of a share in [0, 1], with one decimal."""
    return f"{100 * value:.1f} %"


def share(value: float) -> str:
    """Of a share in [0, 1], with as many decimals as tell it from 0 and from all."""
    percents = 100 * value
    if value == 0 or value == 1:
        return f"{percents:.0f} %"
    if percents < 1:
        return f"{percents:.{1 if percents < 0.01 else 2}g} %"
    return f"{percents:.1f} %" if percents < 10 or percents > 99 else f"{percents:.0f} %"


def memory(size: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def rate(value: float | None, unit: str) -> str:
    """``1.23 TFLOP/s``, ``45.6 GB/s``: three digits and a decimal prefix."""
    if value is None:
        return MISSING
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{significant(value / size)} {prefix}{unit}"
    return f"{significant(value / 1e6)} M{unit}"
