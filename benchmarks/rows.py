"""From times to rows: medians, ratios, floors and distances of losses, and how rich prints them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median, quantiles

from rich.table import Table

from bursts import Result
from floatplan.report.numbers import MISSING, memory, significant
from methods import METHODS

MEANINGS = (
    "quartiles: of the bursts, in ms",
    "/ torch: time over that of torch.amp in the same format (compiled over compiled); below 1 is faster",
    "/ best: time over the better of float32 and torch.amp",
    "memory: what the process took at its peak beside torch and its code",
    "floor: the matrix products alone (in the format or in float32, whichever is faster), and the fewest "
    "bytes that the update moves",
    "loss: largest distance from float32's in the first steps",
)


@dataclass(frozen=True)
class Row:
    """One method on one workload. Times are seconds per step; ``None`` is not known.

    Attributes:
        method: its name.
        median: of the bursts.
        quartiles: the first and third.
        to_torch: median over the rounds of the time over torch.amp's in the same format.
        to_best: the same, over the better of float32 and torch.amp.
        peak: bytes.
        floor: seconds that the products and the update's bytes take alone.
        to_floor: median over floor.
        distance: largest relative distance of a loss of the first steps from float32's.
        left_out: why there are no numbers.
    """

    method: str
    median: float | None = None
    quartiles: tuple[float, float] | None = None
    to_torch: float | None = None
    to_best: float | None = None
    peak: int | None = None
    floor: float | None = None
    to_floor: float | None = None
    distance: float | None = None
    left_out: str | None = None


def rows_of(results: dict[str, Result], floors: dict[str, float]) -> list[Row]:
    """A row for each method.

    Args:
        results: of the methods, by name.
        floors: seconds by format; what is missing is not known.
    """
    return [_row(name, results, floors) for name in results]


def _row(name: str, results: dict[str, Result], floors: dict[str, float]) -> Row:
    result, method = results[name], METHODS[name]
    if result.left_out is not None:
        return Row(name, left_out=result.left_out)
    rivals = [method.plain, method.torch, "torch-fp16" if method.format == "auto" else None]
    there = [rival for rival in rivals if rival in results and results[rival].left_out is None]
    best = min(there, key=lambda rival: median(results[rival].seconds), default=None)
    middle = median(result.seconds)
    floor = min(floors.values()) if method.format == "auto" and floors else floors.get(method.format)
    exact = results.get("fp32")
    return Row(
        name,
        median=middle,
        quartiles=quartiles(result.seconds),
        to_torch=ratio(result, results[method.torch])
        if method.torch in there and method.torch != name
        else None,
        to_best=ratio(result, results[best]) if best is not None and method.owner != "plain" else None,
        peak=result.peak,
        floor=floor,
        to_floor=middle / floor if floor else None,
        distance=distance(result.values, exact.values) if exact and exact.values and name != "fp32" else None,
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def ratio(result: Result, other: Result) -> float:
    """Median of the ratios of times that were taken in one round."""
    return median(a / b for a, b in zip(result.seconds, other.seconds, strict=False))


def distance(values: Sequence[float], exact: Sequence[float]) -> float:
    """Largest relative distance; infinite where a value is not a number."""
    pairs = zip(values, exact, strict=False)
    far = [abs(value - of) / max(abs(of), 1e-12) for value, of in pairs]
    return max((one if math.isfinite(one) else math.inf for one in far), default=0.0)


def floors_of(
    products: dict[str, Result], bytes_by_format: dict[str, int], seconds_per_byte: float
) -> dict[str, float]:
    """Seconds of the floor by format: a method may leave products in float32, where those are faster."""
    times = {name: median(result.seconds) for name, result in products.items() if result.left_out is None}
    found = {}
    for name, size in bytes_by_format.items():
        known = [times[other] for other in {name, "fp32"} if other in times]
        if known:
            found[name] = min(known) + size * seconds_per_byte
    return found


def means(rows_by_workload: dict[str, list[Row]]) -> dict[str, dict[str, float | int]]:
    """Geometric means over the workloads: by method, of each ratio that is known, and of how many."""
    found: dict[str, dict[str, float | int]] = {}
    for name in METHODS:
        mine = [
            row for rows in rows_by_workload.values() for row in rows if row.method == name and row.median
        ]
        of_name: dict[str, float | int] = {}
        for column in ("to_torch", "to_best", "to_floor"):
            if known := [value for row in mine if (value := getattr(row, column)) is not None]:
                of_name[column] = geometric_mean(known)
                of_name["workloads"] = len(known)
        if of_name:
            found[name] = of_name
    return found


# --- As rich prints it ----------------------------------------------------------------------------------


def workload_table(workload: str, rows: Sequence[Row]) -> Table:
    """The rows of one workload; what was left out is a note below them."""
    columns = ("method", "ms", "quartiles", "/ torch", "/ best", "memory", "floor", "/ floor", "loss")
    table = plain_table(workload, columns)
    for row in rows:
        if row.median is None or row.quartiles is None:
            continue
        low, high = row.quartiles
        table.add_row(
            row.method,
            milliseconds(row.median),
            f"{milliseconds(low)} to {milliseconds(high)}",
            or_dash(row.to_torch, two),
            or_dash(row.to_best, two),
            or_dash(row.peak, memory),
            or_dash(row.floor, milliseconds),
            or_dash(row.to_floor, two),
            or_dash(row.distance, percentage),
        )
    return table


def means_table(found: dict[str, dict[str, float | int]]) -> Table:
    """Geometric means by method."""
    table = plain_table("geometric means", ("method", "/ torch", "/ best", "/ floor", "workloads"))
    for name, of_name in found.items():
        ratios = (or_dash(of_name.get(column), two) for column in ("to_torch", "to_best", "to_floor"))
        table.add_row(name, *ratios, str(of_name["workloads"]))
    return table


def plain_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    return table


def milliseconds(seconds: float) -> str:
    """Of seconds, three digits."""
    return significant(1e3 * seconds)


def percentage(value: float) -> str:
    """Of a share, three digits."""
    return f"{significant(100 * value)} %"


def two(value: float) -> str:
    """Two decimals."""
    return f"{value:.2f}"


def or_dash(value: float | None, form: Callable[[float], str]) -> str:
    """A dash for what is not known."""
    return MISSING if value is None else form(value)
