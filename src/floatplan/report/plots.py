"""The figures of a report, as the plain data that plotly.js draws. Needs neither plotly nor torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from statistics import fmean
from typing import Any, TypeAlias

from floatplan.records import StepRecord
from floatplan.report.drift import drift_traces, weight_traces
from floatplan.report.numbers import memory, percent, significant
from floatplan.report.runfile import Run
from floatplan.report.summary import RowSummary, Spread, summarise

Json: TypeAlias = dict[str, Any]
COLOURS = ("#4c78a8", "#e45756", "#2a9d73", "#b279a2", "#d18400", "#72869a")
"""One per row, in table order; each stands out on white and on near-black."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""So that lines which lie on each other show, and rows differ without colour."""
MOST_POINTS = 1000


@dataclass(frozen=True)
class Choice:
    """What a reader picks at a figure: from a menu, or on a slider.

    Attributes:
        label: what is picked.
        options: in words.
        slider: whether they are places in an order.
    """

    label: str
    options: tuple[str, ...]
    slider: bool = False


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        name: identifier within the page.
        title: heading above it.
        caption: what to look at, in a sentence.
        traces: plotly.js traces.
        layout: plotly.js layout, without colours, which follow the page.
        wide: whether it takes half of the page's width, and not a third; more where a line has room.
        full: whether it takes all of that.
        height: in pixels.
        choices: what a reader picks.
        frames: by the places of the options picked, with "|" between: what the first traces have in place of
            their own ("traces"), and the layout ("layout").
        legend: HTML below the plot.
    """

    name: str
    title: str
    caption: str
    traces: list[Json]
    layout: Json
    wide: bool = False
    full: bool = False
    height: int = 300
    choices: tuple[Choice, ...] = ()
    frames: dict[str, Json] = field(default_factory=dict)
    legend: str = ""


def figures(run: Run) -> tuple[Figure, ...]:
    """All figures that the run has data for."""
    summaries = summarise(run)
    if not summaries:
        return ()
    colours = {row: COLOURS[place % len(COLOURS)] for place, row in enumerate(run.header.rows)}
    found = [loss_curves(run, colours)]
    if any(step.scale is not None for step in run.steps):
        found.append(scale_history(run, colours))
    found.append(
        _bars("time", "Seconds per epoch", summaries, colours, lambda s: s.seconds_per_epoch, significant)
    )
    if any(summary.peak_memory for summary in summaries):
        found.append(
            _bars(
                "memory", "Peak memory", summaries, colours, lambda s: s.peak_memory, memory, 2.0**-20, " MiB"
            )
        )
    if any(summary.test_accuracy for summary in summaries):
        found.append(
            _bars(
                "accuracy",
                "Test accuracy",
                summaries,
                colours,
                lambda s: s.test_accuracy,
                percent,
                100.0,
                " %",
            )
        )
    return (*found, *drift_figures(run, colours))


def loss_curves(run: Run, colours: dict[str, str]) -> Figure:
    """Training loss per step: a line per row, the mean over its seeds, and faint lines for each seed."""
    traces = []
    for dash, (row, colour) in zip(cycle(DASHES), colours.items(), strict=False):
        by_seed = [_losses(_steps_of(run, row, seed)) for seed in run.header.seeds]
        by_seed = [losses for losses in by_seed if losses]
        if not by_seed:
            continue
        if len(by_seed) > 1:
            traces += [
                _line(_thinned(losses), row, colour, width=1, opacity=0.3, showlegend=False, hoverinfo="skip")
                for losses in by_seed
            ]
        mean = [fmean(values) for values in zip(*by_seed, strict=False)]
        traces.append(_line(_thinned(mean), row, colour, width=2.5, dash=dash))
    several = len(run.header.seeds) > 1
    return Figure(
        "loss",
        "Training loss",
        "One point per step, on a logarithmic axis. "
        + (
            "Strong lines are means over the seeds, faint ones single seeds."
            if several
            else "Lines that lie on each other train alike."
        ),
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {**log_axis(traces, "y"), "title": {"text": "loss"}},
        },
        wide=True,
    )


def scale_history(run: Run, colours: dict[str, str]) -> Figure:
    """Loss scale per step of each row that scales, with a mark at each skipped step."""
    traces = []
    for row, colour in colours.items():
        for seed in run.header.seeds:
            steps = [step for step in _steps_of(run, row, seed) if step.scale is not None]
            if not steps:
                continue
            name = row if len(run.header.seeds) == 1 else f"{row}, seed {seed}"
            changes = _corners(steps)
            line = {"color": colour, "width": 2, "shape": "hv"}
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": [step.step for step in changes],
                    "y": [step.scale for step in changes],
                    "line": line,
                }
            )
            skipped = [step for step in steps if not step.stepped]
            if skipped:
                traces.append(_marks(skipped, f"{name}: skipped", colour))
    return Figure(
        "scale",
        "Loss scale",
        "A cross marks a step that was skipped because a gradient overflowed; the scale shrinks after it."
        if any(not step.stepped for step in run.steps)
        else "No step was skipped.",
        traces,
        {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {
                "type": "log",
                "dtick": math.log10(2),
                "tickformat": ",",
                "title": {"text": "scale"},
            },
        },
        wide=True,
    )


def drift_figures(run: Run, colours: dict[str, str]) -> list[Figure]:
    """Distance from float32 per low-precision row: on the same weights, and of the weights themselves."""
    step = drift_traces(run, colours)
    weights = weight_traces(run, colours)
    found = []
    if step:
        caption = "The last result of the forward, from the same weights; dotted: what roundings explain."
        found.append(Figure("drift", "Distance from float32", caption, step, _distances(step), wide=True))
    if weights:
        caption = "How far the weights are from those of the fp32 row, which saw the same batches."
        found.append(
            Figure("weights", "Distance of the weights", caption, weights, _distances(weights), wide=True)
        )
    return found


def _distances(traces: list[Json]) -> Json:
    return {
        "xaxis": {**log_axis(traces, "x"), "title": {"text": "step"}},
        "yaxis": {**log_axis(traces, "y"), "title": {"text": "|low - fp32| / |fp32|"}},
    }


def _marks(skipped: list[StepRecord], name: str, colour: str) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step.step for step in skipped],
        "y": [step.scale for step in skipped],
        "text": [step.reason for step in skipped],
        "hovertemplate": "step %{x}, scale %{y}<br>%{text}",
        "marker": {"symbol": "x", "size": 10, "color": colour},
    }


def _bars(
    name: str,
    title: str,
    summaries: tuple[RowSummary, ...],
    colours: dict[str, str],
    field: Callable[[RowSummary], Spread | None],
    form: Callable[[float], str],
    unit: float = 1.0,
    suffix: str = "",
) -> Figure:
    """A bar per row with its value above it, and its deviation where there are several seeds."""
    shown = [(summary, spread) for summary in summaries if (spread := field(summary)) is not None]
    trace: Json = {
        "type": "bar",
        "x": [summary.row for summary, _ in shown],
        "y": [_or_none(spread.mean * unit) for _, spread in shown],
        "text": [form(spread.mean) for _, spread in shown],
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "x+text",
        "marker": {"color": [colours[summary.row] for summary, _ in shown]},
    }
    several = any(spread.deviation is not None for _, spread in shown)
    if several:
        deviations = [(spread.deviation or 0.0) * unit for _, spread in shown]
        trace["error_y"] = {"type": "data", "array": deviations, "color": "#8b949e", "thickness": 1.5}
        trace["textposition"] = "inside"
        trace["insidetextanchor"] = "start"
        trace["insidetextfont"] = {"color": [ink_on(colours[summary.row]) for summary, _ in shown]}
    caption = "Mean and standard deviation over the seeds." if several else ""
    layout = {
        "showlegend": False,
        "xaxis": {"showgrid": False},
        "yaxis": {"ticksuffix": suffix, "rangemode": "tozero"},
    }
    return Figure(name, title, caption, [trace], layout)


def log_axis(traces: list[Json], axis: str) -> Json:
    """A logarithmic axis for the traces; a short one has ticks at 1, 2 and 5 times powers of ten, or nearer.

    Those that plotly.js gives a short one overlap, and are too small to read.
    """
    drawn = [value for trace in traces for value in trace[axis] if value and value > 0]
    if not drawn or max(drawn) > 1000 * min(drawn):
        return {"type": "log"}
    least, most = min(drawn), max(drawn)
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    if sum(least <= tick <= most for tick in ticks) < 3:
        # So short an axis is nearly an even one.
        room = (most - least or least) / 3
        step = max(
            size
            for digit in (1, 2, 5)
            if (size := digit * 10.0 ** math.floor(math.log10(room))) <= room * 1.001
        )
        first = math.floor(least / step)
        ticks = [place * step for place in range(max(1, first), math.ceil(most / step) + 1)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:.4g}" for tick in ticks]}


def ink_on(colour: str) -> str:
    """Black or white, whichever stands out more on a colour such as "#4c78a8" (WCAG 2, contrast ratio)."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _line(
    points: list[tuple[float, float]],
    row: str,
    colour: str,
    *,
    width: float,
    dash: str = "solid",
    **more: Any,
) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": row,
        "legendgroup": row,
        "x": [place for place, _ in points],
        "y": [_or_none(value) for _, value in points],
        "line": {"color": colour, "width": width, "dash": dash},
        **more,
    }


def _steps_of(run: Run, row: str, seed: int) -> list[StepRecord]:
    return [step for step in run.steps if step.row == row and step.seed == seed]


def _losses(steps: list[StepRecord]) -> list[float]:
    return [step.loss for step in steps]


def _thinned(values: list[float]) -> list[tuple[float, float]]:
    """(step, loss) points: all of them, or means over equal stretches where there are too many to see."""
    stretch = math.ceil(len(values) / MOST_POINTS)
    parts = [(start, values[start : start + stretch]) for start in range(0, len(values), stretch)]
    return [(start + (len(part) + 1) / 2, fmean(part)) for start, part in parts]


def _corners(steps: list[StepRecord]) -> list[StepRecord]:
    """The first and last step and each at which the scale is a new one: enough for a line of stairs."""
    changed = [later for earlier, later in pairwise(steps) if later.scale != earlier.scale]
    return [steps[0], *changed, steps[-1]]


def _or_none(value: float) -> float | None:
    """A gap in place of what JSON cannot hold."""
    return value if math.isfinite(value) else None
