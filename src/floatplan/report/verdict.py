"""What a recorded training shows, in words. Says only what its records hold."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from floatplan.records.numbers import WHAT_IF
from floatplan.report.numbers import count, share, significant
from floatplan.report.ranges import (
    LOST,
    PHRASES,
    ModuleRow,
    judged_format,
    module_rows,
    precision_of,
)
from floatplan.report.runfile import TrainingRun
from floatplan.report.safety import overflow_statements, plan_of, underflow_statements
from floatplan.report.statement import Level, Statement, listed
from floatplan.report.timeline import by_optimizer, first_and_last, is_scaled

SKIPS = 0.05
"""Share of steps skipped in the second half of a training; from here on the scale does not settle."""
MANY = 50
"""Steps in that half, below which a share says little."""
SKIPS_AT_END = 3
"""Skipped steps in a row at the end, from which on the training counts as stuck."""

Cell: TypeAlias = tuple[Literal["safe", "risk", "avoid", "unknown"], str]
"""Whether a format is safe for a kind of numbers, and in words. "risk" is one of the training as it ran, and
"avoid" one that there would be, had the numbers lain in the format."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that is said of a training.

    Attributes:
        headline: whether it looks healthy, in a sentence.
        level: the worst of the statements that tell of the training as it ran.
        statements: in the order in which they are shown.
        plan: text of a plan that helps; see `plan_of`.
        format: the low format that was judged first.
    """

    headline: str
    level: Level
    statements: tuple[Statement, ...]
    plan: str
    format: str


def verdict(run: TrainingRun, rows: tuple[ModuleRow, ...] | None = None) -> Verdict:
    """What the records say of health, formats, updates, loss scale and findings.

    Args:
        run: the training.
        rows: of `module_rows`, where they are known already.
    """
    rows = module_rows(run) if rows is None else rows
    name = judged_format(run)
    statements = [
        *finding_statements(run),
        *precision_statements(run, rows, name),
        *loss_statements(run),
        *scale_statements(run),
        *overflow_statements(run, rows),
        *underflow_statements(run, rows),
        *update_statements(rows),
    ]
    bad = [one for one in statements if one.level == "bad"]
    notes = [one for one in statements if one.level == "note"]
    steps = f"{len(run.steps):,} step{'s' if len(run.steps) != 1 else ''}"
    if not run.steps:
        headline = "No step was recorded."
    elif bad:
        headline = f"This training needs a look: {listed([one.short for one in bad])}."
    elif notes:
        headline = f"Nothing went wrong in {steps}; worth knowing: {listed([one.short for one in notes])}."
    else:
        headline = f"Healthy: nothing went wrong in {steps}"
        headline += (
            f", and no recorded module is at risk in {name}." if rows else "; no numbers were recorded."
        )
    level: Level = "bad" if bad else "note" if notes or not run.steps else "good"
    return Verdict(headline, level, tuple(statements), plan_of(run, statements), name)


def finding_statements(run: TrainingRun) -> list[Statement]:
    """What `floatplan.diagnose` found of bad steps; findings that say the same are one."""
    same: dict[tuple[str, ...], list[int]] = {}
    for record in run.findings:
        if not record.diagnosis.is_healthy:
            same.setdefault(tuple(record.diagnosis.sentences()), []).append(record.step)
    found = []
    for sentences, steps in same.items():
        places = f"Step {steps[0]:,}" if len(steps) == 1 else f"Steps {listed([f'{s:,}' for s in steps[:5]])}"
        more = f" and {len(steps) - 5:,} more" if len(steps) > 5 else ""
        text = f"{places}{more}: {' '.join(sentences)}"
        found.append(Statement("bad", "findings", f"step {steps[0]:,} was bad", text))
    return found


def precision_statements(run: TrainingRun, rows: tuple[ModuleRow, ...], name: str) -> list[Statement]:
    """In which formats modules returned what they computed, where one lower than float32 was asked for."""
    formats = Counter(row.dtype for row in rows if row.what == "activation")
    if not formats or precision_of(run) not in ("fp16", "bf16"):
        return []
    said = listed([f"{number:,} returned {format}" for format, number in formats.most_common()])
    text = f"Of the recorded modules, {said}."
    if formats[name]:
        return [Statement("good", "precision", "", text)]
    text = f"{name} was asked for, and no recorded module returned it: {said}."
    if run.header.device.startswith("cpu"):
        text += (
            f" Many CPUs have no fast kernels for {name}, and floatplan keeps float32 there (a "
            "PrecisionWarning says which). fp.Settings(policy=fp.Policy.unified(slow_kernels=True)) runs it "
            "all the same, slowly."
        )
    return [Statement("note", "precision", f"nothing was returned in {name}", text)]


def loss_statements(run: TrainingRun) -> list[Statement]:
    """Where the loss began and ended."""
    found = []
    for place, steps in by_optimizer(run.steps).items():
        whose = "" if place is None else f" of optimizer {place}"
        bad = [one.step for one in steps if one.loss is not None and not math.isfinite(one.loss)]
        losses = [one.loss for one in steps if one.loss is not None]
        if losses and not math.isfinite(losses[-1]):
            text = (
                f"The loss{whose} ends at {losses[-1]}; it was not finite at {len(bad):,} "
                f"step{'s' if len(bad) > 1 else ''}, first {bad[0]:,}."
            )
            text += _who_says(run)
            found.append(Statement("bad", "loss", "the loss is not finite", text))
            continue
        ends = first_and_last(steps)
        if ends is None:
            continue
        first, last = ends
        finite = [one for one in losses if math.isfinite(one)]
        if bad:
            text = (
                f"The loss{whose} was not finite at {len(bad):,} of {len(losses):,} steps, first {bad[0]:,}, "
                f"and ends at {significant(finite[-1])}.{_who_says(run)}"
            )
            found.append(Statement("note", "loss", "some losses were not finite", text))
        elif last > first and place is None:
            text = (
                f"The loss rose from {significant(first)} to {significant(last)} "
                "(means of the first and the last tenth of the steps)."
            )
            found.append(Statement("note", "loss", "the loss did not fall", text))
        else:
            text = (
                f"The loss{whose} went from {significant(first)} to {significant(last)} "
                "(means of the first and the last tenth of the steps)."
            )
            found.append(Statement("good", "loss", "", text))
    return found


def _who_says(run: TrainingRun) -> str:
    """What to ask why a loss is not finite; nothing where a finding says it."""
    if not all(one.diagnosis.is_healthy for one in run.findings):
        return ""
    return " fp.diagnose(model, closure, precision=...) says where that begins."


def scale_statements(run: TrainingRun) -> list[Statement]:
    """What the loss scale did, and which steps were skipped and why."""
    if not run.steps:
        return []
    text = " ".join(filter(None, (_course(run), _skips(run))))
    if not text:
        return []
    half = run.steps[len(run.steps) // 2 :]
    late = sum(not one.stepped for one in half) / len(half)
    row = 0
    for one in reversed(run.steps):
        if one.stepped:
            break
        row += 1
    if row >= SKIPS_AT_END:
        text += f" The last {row:,} steps were all skipped."
        return [Statement("bad", "scale", "its last steps were all skipped", text)]
    if late > SKIPS and len(half) >= MANY:
        text += f" In the second half of the training {share(late)} of the steps were skipped."
        return [Statement("bad", "scale", f"{share(late)} of its later steps were skipped", text)]
    if row == len(run.steps):
        return [Statement("note", "scale", "no step was taken", text)]
    return [Statement("good", "scale", "", text)]


def _course(run: TrainingRun) -> str:
    """Where the scale began and ended; nothing where optimizers have a scale each."""
    if not is_scaled(run) or len(by_optimizer(run.steps)) > 1:
        return ""
    changes = [(one.scale, one.next_scale) for one in run.steps if one.next_scale is not None]
    grew, fell = (
        sum(after > before for before, after in changes),
        sum(after < before for before, after in changes),
    )
    first, last = run.steps[0].scale, run.steps[-1]
    if not grew and not fell:
        return f"The loss scale stayed at {count(first)}."
    end = last.scale if last.next_scale is None else last.next_scale
    moves = [f"grew {_times(grew)}" if grew else "", f"fell {_times(fell)}" if fell else ""]
    return f"The loss scale went from {count(first)} to {count(end)}: it {listed([m for m in moves if m])}."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _in_brackets(*words: str) -> str:
    said = ", ".join(filter(None, words))
    return f" ({said})" if said else ""


def _skips(run: TrainingRun) -> str:
    skipped = [one for one in run.steps if not one.stepped]
    if not skipped:
        return "No step was skipped." if is_scaled(run) else ""
    causes = Counter((one.reason, one.blamed) for one in skipped).most_common(3)
    said = "; ".join(
        f"{reason}{_in_brackets(culprit or '', f'{number:,} times' if number > 1 else '')}"
        for (reason, culprit), number in causes
    )
    return (
        f"{len(skipped):,} of {len(run.steps):,} steps {'were' if len(skipped) > 1 else 'was'} skipped, "
        f"the last at step {skipped[-1].step:,}: {said}."
    )


def update_statements(rows: tuple[ModuleRow, ...]) -> list[Statement]:
    """Where updates round away: in the weights' own format, and in bf16 and fp16 had they lain there."""
    told = [row for row in rows if row.what == "update" and row.lost is not None and row.lost.count]
    if not told:
        return []
    found = []
    for dtype in dict.fromkeys(row.dtype for row in told):
        mine = [row for row in told if row.dtype == dtype]
        own = sum(row.lost.own * row.lost.count for row in mine if row.lost)
        all_of = sum(row.lost.count for row in mine if row.lost)
        worst = max(mine, key=lambda row: row.lost.own if row.lost else 0.0)
        most = worst.lost.own if worst.lost else 0.0
        parts = [f"Of the updates of weights in {dtype}, {share(own / all_of)} rounded away"]
        parts += [f" (most in {worst.label}: {share(most)})"] if most else []
        would = _would_lose(mine)
        parts += [f"; {would}"] if would else []
        text = "".join(parts) + "."
        if most > LOST:
            text += (
                " They are too small beside the weights: look at the learning rate there."
                if dtype == "fp32"
                else " Keep the weights in float32: fp.upcast_trainable(model)."
            )
            short = f"{share(most)} of the updates of {worst.label} are lost"
            found.append(Statement("note" if dtype == "fp32" else "bad", "updates", short, text))
        else:
            found.append(Statement("good", "updates", "", text))
    return found


def _would_lose(rows: list[ModuleRow]) -> str:
    """What it would be, had the weights lain in a 16-bit format of which that was told."""
    said = []
    for name in ("bf16", "fp16"):
        told = [row for row in rows if row.lost and name in row.lost.in_format]
        all_of = sum(row.lost.count for row in told if row.lost)
        if all_of and name != rows[0].dtype:
            lost = sum(row.lost.in_format[name] * row.lost.count for row in told if row.lost)
            said.append(f"{share(lost / all_of)} in {name}")
    return f"were the weights kept in 16 bits, it would be {listed(said)}" if said else ""


def safety_grid(rows: tuple[ModuleRow, ...]) -> dict[str, dict[str, Cell]]:
    """Kind of number to format to whether it is safe there in all modules, and in words which are not."""
    grid: dict[str, dict[str, Cell]] = {}
    for what in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == what]
        grid[what] = {name: _cell(mine, name) for name in WHAT_IF}
    return grid


def _cell(rows: list[ModuleRow], name: str) -> Cell:
    risks = Counter(row.fits[name].risk for row in rows)
    modules = len(rows)
    said = [
        f"{risks[risk]} {phrase}"
        for risk, phrase in PHRASES.items()
        if risks[risk] and risk not in ("none", "unknown")
    ]
    if said:
        risky = (row for row in rows if row.fits[name].risk not in ("none", "unknown"))
        ran = any(row.dtype == name for row in risky)
        return "risk" if ran else "avoid", f"{', '.join(said)}, of {modules}"
    if risks["unknown"]:
        return "unknown", f"{risks['unknown']} of {modules}: not recorded"
    if any(row.dtype == name for row in rows):
        return "safe", f"{modules} fit; what became 0 is not known"
    return "safe", f"all {modules} fit"
