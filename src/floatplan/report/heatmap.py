"""Modules x exponents: where the numbers of each kind lie between the limits of formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from floatplan.formats import FORMATS
from floatplan.records import Numbers, NumbersKind, NumbersRecord
from floatplan.records.numbers import WHAT_IF
from floatplan.report.plots import COLOURS, Choice, Figure, Json
from floatplan.report.ranges import ModuleRow, by_risk, total
from floatplan.report.runfile import TrainingRun
from floatplan.report.timeline import stretches
from floatplan.report.training_tables import NAMES

MOST_LINES = 60
"""Modules shown of each kind; of more, those at the highest risk."""
MOST_FRAMES = 12
"""Stretches of recorded steps that can be chosen."""
GAP = 2
"""Free places between exponents and the places of zeros and of what is not finite."""
ABOVE, BELOW = 84, 60
"""Pixels for the bars of formats, and for the axis."""
HALF = 0.5
"""The place of an exponent e, of magnitudes from 2**e up to 2**(e + 1), is centred on e."""
_LEAST, _MOST = -26, 17
"""Exponents that are shown in any case: all of fp16."""
Key = tuple[NumbersKind, str, str]


def heat_map(run: TrainingRun, rows: Sequence[ModuleRow], judged: str) -> Figure | None:
    """Shares of numbers by exponent, a line per module, for each kind and stretch of steps; None without any.

    Args:
        run: the training.
        rows: of `module_rows`.
        judged: format in which the modules at risk are chosen where there are too many.
    """
    if not run.numbers:
        return None
    lines = {what: _lines(rows, what, judged) for what in dict.fromkeys(row.what for row in rows)}
    parts = stretches(sorted({record.step for record in run.numbers}), MOST_FRAMES)
    whole = {(row.what, row.module, row.dtype): row.numbers for row in rows}
    sums = [whole, *(_sums(run, set(part)) for part in parts)] if len(parts) > 1 else [whole]
    height = 22 if max(map(len, lines.values())) <= 30 else 16
    height = ABOVE + height * max(6, *map(len, lines.values())) + BELOW
    frames = {}
    for kind, shown in enumerate(lines.values()):
        view = _view(whole[key] for _, key in shown)
        for place, found in enumerate(sums):
            name = f"{kind}|{place}" if len(sums) > 1 else f"{kind}"
            traces = [*_heat(shown, found, *view), *_bars(*view)]
            frames[name] = {"traces": traces, "layout": _axes(*view, ABOVE / (height - BELOW))}
    first: Json = next(iter(frames.values()))
    choices = [Choice("numbers", tuple(NAMES[what] for what in lines))]
    if len(parts) > 1:
        choices.append(Choice("over", ("the whole training", *map(_stretch, parts)), slider=True))
    left_out = any(len(shown) < sum(row.what == what for row in rows) for what, shown in lines.items())
    return Figure(
        "heat",
        "Where the numbers lie",
        "Each line shows how the numbers of one module spread over magnitudes; the bars above show what "
        "formats can hold, thin where they have fewer digits. What lies right of a bar overflows in that "
        "format, what lies left of it becomes 0."
        + (f" Shown are the {MOST_LINES} modules at the highest risk." if left_out else ""),
        [{**(_HEAT if "z" in trace else _BAR), **trace} for trace in first["traces"]],
        {**_PLAIN, **first["layout"]},
        full=True,
        height=height,
        choices=tuple(choices),
        frames=frames,
        legend=_LEGEND,
    )


_HEAT: Json = {
    "type": "heatmap",
    "zmin": 0,
    "zmax": 100,
    "xgap": 0.5,
    "ygap": 1,
    "showscale": False,
    "hoverongaps": False,
}
_PLAIN: Json = {"showlegend": False, "margin": {"l": 10, "r": 10, "t": 10, "b": 10}}
_BAR: Json = {"type": "scatter", "mode": "lines", "yaxis": "y2"}
_SHARES = ("to 0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %")
_LEGEND = (
    '<p class="heat">share of the numbers: '
    + "".join(
        f'<span><i style="background: var(--heat-{place})"></i>{words}</span>'
        for place, words in enumerate(_SHARES, 1)
    )
    + '</p><p class="heat">largest (solid line), smallest normal (dashes), smallest (dots): '
    + "".join(
        f'<span><i style="background: {colour}"></i>{name}: {FORMATS[name].max:.6g}, '
        f"{FORMATS[name].smallest_normal:.3g}, {FORMATS[name].smallest_subnormal:.3g}</span>"
        for colour, name in zip(COLOURS, WHAT_IF, strict=False)
    )
    + "</p>"
)


def _lines(rows: Sequence[ModuleRow], what: NumbersKind, judged: str) -> list[tuple[str, Key]]:
    """Label and key of each line, in the order of the model."""
    mine = [row for row in rows if row.what == what]
    kept = [(row.module, row.dtype) for row in by_risk(mine, judged)[:MOST_LINES]]
    several = {row.module for row in mine if sum(other.module == row.module for other in mine) > 1}
    return [
        (
            escape(short(row.label), quote=False) + (f" ({row.dtype})" if row.module in several else ""),
            (row.what, row.module, row.dtype),
        )
        for row in mine
        if (row.module, row.dtype) in kept
    ]


def short(name: str, most: int = 28) -> str:
    """A name that leaves room on a narrow page: its middle left out."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}\u2026{name[-most // 2 :]}"


def _stretch(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"


def _sums(run: TrainingRun, steps: set[int]) -> dict[Key, Numbers]:
    """Numbers by kind, module and format, over some steps."""
    skipped = {one.step for one in run.steps if not one.stepped}
    found: dict[Key, list[NumbersRecord]] = {}
    for record in run.numbers:
        of_gradients = record.what in ("gradient", "weight gradient")
        if record.step in steps and not (of_gradients and record.step in skipped):
            found.setdefault((record.what, record.module, record.dtype), []).append(record)
    return {key: total(record.numbers for record in records) for key, records in found.items()}


def _view(numbers: Iterable[Numbers]) -> tuple[int, int]:
    """The exponents that are shown: all that there are, and those of fp16 in any case."""
    exponents = [exponent for one in numbers for exponent in one.exponents()]
    return min(_LEAST, *exponents, 0), max(_MOST, *exponents, 0)


def _heat(shown: list[tuple[str, Key]], found: dict[Key, Numbers], low: int, high: int) -> list[Json]:
    """Three heat maps side by side: of exponents, of zeros, of what is not finite."""
    of_lines = [found.get(key) for _, key in shown]
    maps = {
        "2<sup>%{x}</sup> and up": (
            list(range(low, high + 1)),
            [exponent_shares(numbers, low, high) for numbers in of_lines],
        ),
        "0": ([low - GAP - 1], [[_percent(one.zeros) if one else None] for one in of_lines]),
        "inf or NaN": ([high + GAP + 1], [[_percent(one.not_finite) if one else None] for one in of_lines]),
    }
    return [
        {
            "x": x,
            "y": [label for label, _ in shown],
            "z": z,
            "hovertemplate": f"%{{y}}<br>{words}: %{{z}} %<extra></extra>",
        }
        for words, (x, z) in maps.items()
    ]


def exponent_shares(numbers: Numbers | None, low: int, high: int) -> list[float | None]:
    """Percent of all numbers with each exponent from low to high; None for none."""
    found = numbers.exponents() if numbers else {}
    all_of = numbers.count if numbers else 1
    return [_percent(found.get(exponent, 0) / all_of) for exponent in range(low, high + 1)]


def _percent(part: float) -> float | None:
    return float(f"{100 * part:.4g}") if part else None


def _bars(low: int, high: int) -> list[Json]:
    """Of each format a thin line over all its numbers, and a thick one over the normal ones."""
    traces: list[Json] = []
    for colour, name in zip(COLOURS, WHAT_IF, strict=False):
        format = FORMATS[name]
        words = (
            f"{name}: largest {format.max:g}, smallest normal {format.smallest_normal:.3g}, "
            f"smallest {format.smallest_subnormal:.3g}"
        )
        for start, width in ((format.smallest_subnormal, 2), (format.smallest_normal, 8)):
            ends = [max(math.log2(start), low - GAP), min(math.log2(format.max), high + GAP)]
            traces.append(
                {
                    "x": [round(end - HALF, 3) for end in ends],
                    "y": [name, name],
                    "line": {"color": colour, "width": width},
                    "hovertemplate": words + "<extra></extra>",
                }
            )
    return traces


def _axes(low: int, high: int, above: float) -> Json:
    """Axes and limits; ``above`` is the share of the height that the bars take."""
    ticks = [place for place in range(-144, 129, 8) if low <= place <= high + 1]
    fixed = {"fixedrange": True, "showgrid": False, "zeroline": False}
    lines = {**fixed, "type": "category", "autorange": "reversed"}
    return {
        "xaxis": {
            **fixed,
            "range": [low - GAP - 1.5, high + GAP + 1.5],
            "tickvals": [low - GAP - 1, *(place - HALF for place in ticks), high + GAP + 1],
            "ticktext": ["0", *(f"2<sup>{place}</sup>" for place in ticks), "inf"],
            "tickangle": 0,
            "title": {"text": "magnitude"},
        },
        "yaxis": {**lines, "domain": [0, 0.98 - above], "tickmode": "linear"},
        "yaxis2": {**lines, "domain": [1 - above, 1], "tickmode": "linear"},
        "shapes": [_limit(*limit) for limit in limits(low, high)],
    }


def limits(low: int, high: int) -> list[tuple[float, str, str]]:
    """(power of two, colour, dash) of each limit in view: largest, smallest normal, smallest number."""
    found = []
    for colour, name in zip(COLOURS, WHAT_IF, strict=False):
        format = FORMATS[name]
        for value, dash in (
            (format.max, "solid"),
            (format.smallest_normal, "dash"),
            (format.smallest_subnormal, "dot"),
        ):
            if low - GAP < math.log2(value) < high + GAP:
                found.append((math.log2(value), colour, dash))
    return found


def _limit(place: float, colour: str, dash: str) -> Json:
    line = {"color": colour, "width": 1.2, "dash": dash}
    place -= HALF
    return {"type": "line", "yref": "paper", "x0": place, "x1": place, "y0": 0, "y1": 0.97, "line": line}
