"""``report.html`` of a recorded training."""

from __future__ import annotations

from html import escape
from pathlib import Path

from floatplan.errors import RunFolderError
from floatplan.report.heatmap import heat_map
from floatplan.report.html import document, facts_part, problems_part
from floatplan.report.numbers import MISSING, count, share, significant
from floatplan.report.ranges import by_risk, module_rows, precision_of
from floatplan.report.runfile import REPORT_FILE, TrainingRun
from floatplan.report.timeline import by_optimizer, first_and_last, is_scaled, timed_parts
from floatplan.report.training_plots import lines_of, step_figures, time_figure
from floatplan.report.training_tables import casts_part, grid_part, milliseconds, risk_part, time_part
from floatplan.report.verdict import Verdict, verdict

TOPICS = {
    "precision": "precision",
    "findings": "finding",
    "loss": "loss",
    "scale": "loss scale",
    "overflow": "overflow",
    "underflow": "underflow",
    "updates": "updates",
}


def render_training(run: TrainingRun) -> str:
    """The whole page of a training.

    Raises:
        PlotlyMissing: plotly is not installed.
    """
    rows = module_rows(run)
    found = verdict(run, rows)
    riskiest = by_risk(rows, found.format)[0].label if rows else ""
    drawn = [*step_figures(lines_of({"": run})), time_figure(run.steps), heat_map(run, rows, found.format)]
    before = [
        f"<p>{escape(about(run))}</p>",
        f'<p class="conclusion {found.level}">{escape(found.headline)}</p>',
        _tiles(run, found, riskiest),
        problems_part(run.problems),
        said_part(found),
        grid_part(rows),
    ]
    after = [
        risk_part(rows, found.format),
        casts_part(run.casts),
        time_part(timed_parts(run.steps)),
        notes_part(run),
        machine_part(run),
    ]
    return document(title_of(run), before, [figure for figure in drawn if figure], after)


def write_page(page: str, path: Path) -> Path:
    """Write a page and return its path.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}; name another with --out") from error
    return path


def write_training_report(run: TrainingRun, folder: Path) -> Path:
    """Write ``report.html`` for ``run`` into ``folder`` and return its path.

    Raises:
        PlotlyMissing: plotly is not installed.
        RunFolderError: the file cannot be written.
    """
    return write_page(render_training(run), folder / REPORT_FILE)


def title_of(run: TrainingRun) -> str:
    """Model and precision."""
    return run.header.model + (f" in {precision_of(run)}" if precision_of(run) else "")


def about(run: TrainingRun) -> str:
    """What was trained and recorded, in a sentence or two."""
    header = run.header
    parts = [f"{count(header.parameters)} parameters on {header.device}"]
    parts += [f"{header.ranks} processes, of which the first is recorded"] if header.ranks > 1 else []
    parts += [f"{header.accumulate} micro-batches a step"] if header.accumulate > 1 else []
    steps = {record.step for record in run.numbers}
    recorded = "No numbers were recorded."
    if steps:
        recorded = f"Numbers were recorded at {len(steps):,} step{'s' if len(steps) > 1 else ''}."
    if len(steps) == 1 and len(run.steps) > 1:
        (only,) = steps
        recorded = (
            f"Numbers were recorded at step {only:,} alone: what is said of them holds there. "
            "fp.record(folder, every=50) records more."
        )
    after = f" The training went on from step {header.after:,}." if header.after else ""
    return f"{'; '.join(parts)}. {recorded}{after}"


def said_part(found: Verdict) -> str:
    """The statements as a list, and the plan."""
    items = "".join(
        f'<li class="{one.level}"><span class="tag">{escape(TOPICS[one.topic])}</span>'
        f"<span>{escape(unbroken(one.text))}</span></li>"
        for one in sorted(found.statements, key=lambda one: ("bad", "note", "good").index(one.level))
    )
    plan = (
        "<p>The plan that trains in fp16 all that has room in it; fp.Amp takes it as fp.Plan.load(file):</p>"
        f"<pre>{escape(found.plan.rstrip())}</pre>"
        if found.plan
        else ""
    )
    return (f'<ul class="said">{items}</ul>' if items else "") + plan


def unbroken(text: str) -> str:
    """The same with percentages that no line ends within."""
    return text.replace(" %", "\u00a0%")


def notes_part(run: TrainingRun) -> str:
    """What was not seen."""
    items = "".join(f"<li>{escape(note)}</li>" for note in run.header.notes)
    return f'<h2>What was not seen</h2><ul class="notes">{items}</ul>' if items else ""


def machine_part(run: TrainingRun) -> str:
    """When and where, and with which versions."""
    header = run.header
    facts = [("started", header.started), *header.machine.items(), *header.versions.items()]
    return "<h2>Machine and versions</h2>" + facts_part(facts)


def tiles(run: TrainingRun) -> dict[str, str]:
    """The figures in large: label to text."""
    skipped = sum(not one.stepped for one in run.steps)
    parts = {part.name: part for part in timed_parts(run.steps)}
    alone = len(by_optimizer(run.steps)) == 1
    ends = first_and_last(run.steps) if alone else None
    named = {
        "steps": count(len(run.steps)),
        "skipped": f"{skipped:,} ({share(skipped / len(run.steps))})" if run.steps else MISSING,
        "loss, first and last tenth": f"{significant(ends[0])} \u2192 {significant(ends[1])}"
        if ends
        else MISSING,
        "loss scale at the end": count(run.steps[-1].scale) if is_scaled(run) and alone else MISSING,
        "median time of a step": milliseconds(parts["all"].median if "all" in parts else None),
    }
    return {label: text for label, text in named.items() if text != MISSING}


def _tiles(run: TrainingRun, found: Verdict, riskiest: str) -> str:
    named = tiles(run)
    if riskiest and found.level != "good":
        named[f"highest risk in {found.format}"] = riskiest
    boxes = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(text)}</b></div>'
        for label, text in named.items()
    )
    return f'<div class="tiles">{boxes}</div>'
