"""The figures of recorded trainings over their steps, as the plain data that plotly.js draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import cycle, pairwise
from statistics import fmean, median

from floatplan.records import ScaleEvent, TrainedStep, scale_history
from floatplan.report.numbers import count
from floatplan.report.plots import COLOURS, DASHES, MOST_POINTS, Figure, Json, log_axis
from floatplan.report.runfile import TrainingRun
from floatplan.report.timeline import PARTS, by_optimizer, seconds_of, stretches, thinned

MOST_STRETCHES = 120
"""Points of the plot of times, each of them a median."""
_MARKS: dict[str, tuple[str, str, str]] = {
    "skip": ("skipped", "x", COLOURS[1]),
    "growth": ("grew", "triangle-up", COLOURS[2]),
    "fall": ("fell", "triangle-down", COLOURS[4]),
}
Lines = Mapping[str, Sequence[TrainedStep]]


def lines_of(runs: Mapping[str, TrainingRun]) -> dict[str, tuple[TrainedStep, ...]]:
    """A line per training and optimizer that steps alone, by name."""
    found = {}
    for name, run in runs.items():
        for place, steps in by_optimizer(run.steps).items():
            own = "" if place is None else f"optimizer {place}"
            found[", ".join(filter(None, (escape(name, quote=False), own)))] = steps
    return found


def step_figures(lines: Lines) -> tuple[Figure, ...]:
    """Loss, loss scale and norm of the gradients over the steps, as far as there are any."""
    found = []
    if any(one.loss is not None for steps in lines.values() for one in steps):
        found.append(loss_figure(lines))
    if any(one.scale != 1.0 or not one.stepped for steps in lines.values() for one in steps):
        found.append(scale_figure(lines))
    if any(one.grad_norm is not None for steps in lines.values() for one in steps):
        found.append(norm_figure(lines))
    return tuple(found)


def loss_figure(lines: Lines) -> Figure:
    """Loss per step, and a cross at each skipped one."""
    traces = _curves(lines, lambda one: one.loss)
    for name, steps in lines.items():
        skipped = [one for one in steps if not one.stepped and _is_drawn(one.loss)]
        if skipped:
            text = [_cause(one.reason, one.blamed) for one in skipped]
            traces.append(
                _marks("skip", name, skipped, [one.loss or 0.0 for one in skipped], text, len(lines))
            )
    losses = [one.loss for steps in lines.values() for one in steps if one.loss is not None]
    missing = sum(not math.isfinite(one) for one in losses)
    gaps = f" Gaps: {missing:,} that {'are' if missing > 1 else 'is'} not finite." if missing else ""
    caption = "One point per step, unscaled." + gaps
    if any(len(steps) > MOST_POINTS for steps in lines.values()):
        caption = f"Means over equal stretches of steps, unscaled.{gaps}"
    positive = all(one > 0 for one in losses if math.isfinite(one))
    return Figure("loss", "Loss", caption, traces, _axes("loss", traces, log=positive), wide=True)


def scale_figure(lines: Lines) -> Figure:
    """Loss scale per step, with a mark at each growth, fall and skipped step, and why."""
    traces: list[Json] = []
    number = {"skip": 0, "growth": 0, "fall": 0}
    for colour, dash, (name, steps) in zip(cycle(COLOURS), cycle(DASHES), lines.items(), strict=False):
        corners = _corners(steps)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name or "scale",
                "x": [one.step for one in corners],
                "y": [_drawn(one.scale) for one in corners],
                "line": {"color": colour, "width": 2, "shape": "hv", "dash": dash},
            }
        )
        events = scale_history(steps)
        for kind in _MARKS:
            mine = [event for event in events if event.kind == kind]
            number[kind] += len(mine)
            if mine:
                mine = [part[-1] for part in stretches(mine, MOST_POINTS)]
                before = [event.before for event in mine]
                traces.append(_marks(kind, name, mine, before, [_move(event) for event in mine], len(lines)))
    caption = (
        f"{_number(number['skip'], 'skipped step')}, {_number(number['growth'], 'growth', 's')}, "
        f"{_number(number['fall'], 'fall')} without a skip. The cause is at each mark."
    )
    layout = _axes("scale", traces, log=True)
    if _octaves(lines) < 9:
        layout["yaxis"] = {**layout["yaxis"], "tickvals": None, "dtick": math.log10(2), "tickformat": ","}
    return Figure("scale", "Loss scale", caption, traces, layout, wide=True)


def norm_figure(lines: Lines) -> Figure:
    """Norm of the gradients per step."""
    caption = "Over all gradients together, unscaled and before clipping; a gap is one that is not finite."
    traces = _curves(lines, lambda one: one.grad_norm)
    return Figure("norm", "Gradient norm", caption, traces, _axes("norm", traces, log=True), wide=True)


def time_figure(steps: Sequence[TrainedStep]) -> Figure | None:
    """Milliseconds of each part of a step, one upon another; None where nothing was timed."""
    timed = [one for one in steps if one.seconds is not None]
    if not timed:
        return None
    traces: list[Json] = []
    for colour, part in zip(COLOURS, PARTS, strict=False):
        points = [
            (one.step, 1e3 * seconds) for one in timed if (seconds := seconds_of(one, part)) is not None
        ]
        found = thinned(points, MOST_STRETCHES, median)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": part,
                "stackgroup": "parts",
                "x": [place for place, _ in found],
                "y": [value for _, value in found],
                "line": {"color": colour, "width": 1},
                "hovertemplate": "%{y:.3g} ms",
            }
        )
    caption = "Milliseconds of a step. "
    caption += (
        "One point per step." if len(timed) <= MOST_STRETCHES else "Medians over equal stretches of steps."
    )
    layout = _axes("ms", traces, log=False)
    return Figure("time", "Time of a step", caption, traces, layout, wide=True)


def compared_times(runs: Mapping[str, TrainingRun]) -> Figure | None:
    """Seconds per step of several trainings; None where nothing was timed."""
    lines = {name: [one for one in run.steps if one.seconds is not None] for name, run in runs.items()}
    lines = {name: steps for name, steps in lines.items() if steps}
    if not lines:
        return None
    traces = _curves(lines, lambda one: 1e3 * one.seconds if one.seconds is not None else None, median)
    return Figure(
        "time", "Time of a step", "Milliseconds of a step.", traces, _axes("ms", traces, log=False), wide=True
    )


def _curves(
    lines: Lines,
    field: Callable[[TrainedStep], float | None],
    of: Callable[[Iterable[float]], float] = fmean,
) -> list[Json]:
    traces: list[Json] = []
    for colour, dash, (name, steps) in zip(cycle(COLOURS), cycle(DASHES), lines.items(), strict=False):
        points = [(one.step, value) for one in steps if (value := field(one)) is not None]
        found = thinned(points, MOST_POINTS, of)
        if not found:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(found) > 1 else "markers",
                "name": name or "every step",
                "x": [place for place, _ in found],
                "y": [_drawn(value) for _, value in found],
                "line": {"color": colour, "width": 2, "dash": dash},
                "showlegend": len(lines) > 1,
            }
        )
    return traces


def _marks(
    kind: str,
    line: str,
    at: Sequence[TrainedStep] | Sequence[ScaleEvent],
    y: Sequence[float],
    text: Sequence[str],
    lines: int,
) -> Json:
    words, symbol, colour = _MARKS[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{line}: {words}" if lines > 1 else words,
        "x": [one.step for one in at],
        "y": [_drawn(value) for value in y],
        "text": list(text),
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        "marker": {"symbol": symbol, "size": 9, "color": colour},
    }


def _move(event: ScaleEvent) -> str:
    after = "" if event.after is None else f" to {count(event.after)}"
    return f"{count(event.before)}{after}<br>{_cause(event.cause, event.culprit)}"


def _cause(reason: str, culprit: str | None) -> str:
    # Plotly reads its texts as HTML, and a line may not get wider than a page.
    words, lines = f"{reason}{f' in {culprit}' if culprit else ''}".split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 44:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "<br>".join(escape(line, quote=False) for line in lines)


def _corners(steps: Sequence[TrainedStep]) -> list[TrainedStep]:
    """The first and last step and those that change the scale: enough for a line of stairs."""
    changed = [later for earlier, later in pairwise(steps) if later.scale != earlier.scale]
    return [steps[0], *(part[-1] for part in stretches(changed, MOST_POINTS)), steps[-1]]


def _octaves(lines: Lines) -> float:
    scales = [
        one.scale for steps in lines.values() for one in steps if _is_drawn(one.scale) and one.scale > 0
    ]
    return math.log2(max(scales) / min(scales)) if scales else 0.0


def _axes(name: str, traces: list[Json], *, log: bool) -> Json:
    yaxis: Json = {"title": {"text": name}}
    if log:
        yaxis |= log_axis(traces, "y")
    return {"xaxis": {"title": {"text": "step"}}, "yaxis": yaxis}


def _number(number: int, word: str, plural: str = "s") -> str:
    return f"{number:,} {word}{'' if number == 1 else plural}"


def _is_drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _drawn(value: float) -> float | None:
    """A gap in place of what JSON cannot hold."""
    return value if math.isfinite(value) else None
