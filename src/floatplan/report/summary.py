"""A run in a few numbers per row, and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from floatplan.records import ResultRecord
from floatplan.report.drift import drift_notes
from floatplan.report.runfile import Run

BASELINE = "fp32"
ONE_SEED = "; one seed does not tell how much it varies."
CLOSE_ENOUGH = 0.01
"""Test accuracies this near to float32's count as equal: one point."""
SAME_SPEED = 1.1
STEADY = 1.5
"""Epochs of one training that differ by more than this factor were disturbed by other work."""
JITTER_SECONDS = 0.2
"""Epochs shorter than this vary by themselves."""


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds, and their standard deviation (of a sample; ``None`` for one seed)."""

    mean: float
    deviation: float | None = None

    @staticmethod
    def of(values: list[float]) -> Spread:
        """The spread of at least one value."""
        return Spread(
            fmean(values), stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
        )


@dataclass(frozen=True)
class RowSummary:
    """One line of the table; the fields are those of `ResultRecord` over the seeds that finished.

    Attributes:
        row: name of the row.
        seeds: how many trainings finished.
        seconds_per_epoch: seconds.
        images_per_second: training examples per second.
        speed: examples per second over the baseline's with the same seed; ``None`` without a baseline.
        peak_memory: bytes; ``None`` where it is not known.
        train_loss: mean over the last epoch.
        test_accuracy: in [0, 1]; ``None`` where the task has none.
        skipped_steps: steps that gradient scaling refused.
        final_scale: ``None`` in rows without scaling.
        notes: each sentence once.
    """

    row: str
    seeds: int
    seconds_per_epoch: Spread
    images_per_second: Spread
    speed: Spread | None
    peak_memory: Spread | None
    train_loss: Spread
    test_accuracy: Spread | None
    skipped_steps: Spread
    final_scale: Spread | None
    notes: tuple[str, ...]


def summarise(run: Run) -> tuple[RowSummary, ...]:
    """One summary for each row with a finished training, in the order that was asked for."""
    baseline = {result.seed: result for result in run.results if result.row == BASELINE}
    summaries = []
    for row in run.header.rows:
        results = [result for result in run.results if result.row == row]
        if results:
            summaries.append(_summary(row, results, baseline))
    return tuple(summaries)


def _summary(row: str, results: list[ResultRecord], baseline: dict[int, ResultRecord]) -> RowSummary:
    speeds = [
        result.images_per_second / baseline[result.seed].images_per_second
        for result in results
        if result.seed in baseline
    ]
    memories = [float(result.peak_memory) for result in results if result.peak_memory is not None]
    accuracies = [result.test_accuracy for result in results if result.test_accuracy is not None]
    scales = [result.final_scale for result in results if result.final_scale is not None]
    return RowSummary(
        row=row,
        seeds=len(results),
        seconds_per_epoch=Spread.of([result.seconds_per_epoch for result in results]),
        images_per_second=Spread.of([result.images_per_second for result in results]),
        speed=Spread.of(speeds) if speeds else None,
        peak_memory=Spread.of(memories) if memories else None,
        train_loss=Spread.of([result.train_loss for result in results]),
        test_accuracy=Spread.of(accuracies) if accuracies else None,
        skipped_steps=Spread.of([float(result.skipped_steps) for result in results]),
        final_scale=Spread.of(scales) if scales else None,
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def notes(run: Run) -> tuple[str, ...]:
    """What a reader must know beside the numbers: notes of the rows, where they leave float32,
    then trainings that failed."""
    said = [f"{summary.row}: {note}" for summary in summarise(run) for note in summary.notes]
    said += _disturbed(run)
    failed = [
        f"{failure.row} (seed {failure.seed}) did not finish: {failure.message}" for failure in run.failures
    ]
    return (*said, *drift_notes(run), *failed)


def _disturbed(run: Run) -> list[str]:
    """A sentence if epoch times say that the machine was not quiet."""
    times: dict[tuple[str, int], list[float]] = {}
    for epoch in run.epochs:
        times.setdefault((epoch.row, epoch.seed), []).append(epoch.seconds)
    long = [seconds for seconds in times.values() if min(seconds) > JITTER_SECONDS]
    worst = max((max(seconds) / min(seconds) for seconds in long), default=1.0)
    if worst <= STEADY:
        return []
    return [
        f"epochs of one and the same training took up to {worst:.1f} times longer than others: "
        "probably something else ran on this machine, and times and speeds are not reliable"
    ]


def conclusion(run: Run) -> str:
    """Which row is fastest here, if that can be told, and whether the accuracies agree."""
    summaries = summarise(run)
    if not summaries:
        return "No training finished."
    sound = [summary for summary in summaries if math.isfinite(summary.train_loss.mean)]
    parts = [f"{s.row} did not train: its loss is not finite." for s in summaries if s not in sound]
    if _disturbed(run) and len(summaries) > 1:
        parts.append("This run does not tell which row is fastest: its times are not reliable.")
    elif sound:
        parts.append(_on_speed(sound))
    baseline = next((summary for summary in sound if summary.row == BASELINE), None)
    others = [summary for summary in sound if summary is not baseline]
    if baseline is not None and baseline.test_accuracy is not None:
        found = {other.row: other.test_accuracy for other in others if other.test_accuracy is not None}
        if found:
            parts.append(_on_accuracy(baseline.test_accuracy, found))
    return " ".join(parts)


def _on_speed(summaries: list[RowSummary]) -> str:
    fastest = max(summaries, key=lambda summary: summary.images_per_second.mean)
    rate = f"{fastest.images_per_second.mean:,.0f} examples per second"
    if fastest.speed is None or len(summaries) == 1:
        return (
            f"{fastest.row} runs at {rate} here."
            if len(summaries) == 1
            else f"{fastest.row} is fastest here: {rate}."
        )
    others = [summary for summary in summaries if summary is not fastest]
    if fastest.row == BASELINE:
        slower = _listed([f"{other.row} at {other.speed.mean:.2f}" for other in others if other.speed])
        return f"{BASELINE} is fastest here ({rate}); {slower} of its rate."
    if fastest.speed.mean < SAME_SPEED:
        return f"{fastest.row} is as fast as {BASELINE} here ({rate})."
    return f"{fastest.row} is fastest here: {rate}, {fastest.speed.mean:.2f} times {BASELINE}."


def _listed(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _on_accuracy(baseline: Spread, others: dict[str, Spread]) -> str:
    gaps = {row: spread.mean - baseline.mean for row, spread in others.items()}
    far = {row: gap for row, gap in gaps.items() if abs(gap) > CLOSE_ENOUGH}
    if far:
        listed = _listed([f"{row}'s by {100 * gap:+.1f} points" for row, gap in far.items()])
        text = f"Test accuracy differs from {BASELINE}'s by more than a point: {listed}"
        return text + (ONE_SEED if baseline.deviation is None else ".")
    widest = f"{100 * max(map(abs, gaps.values())):.1f}"
    agreement = (
        f"equals {BASELINE}'s" if widest == "0.0" else f"agrees with {BASELINE}'s within {widest} points"
    )
    text = f"Test accuracy {agreement}"
    if baseline.deviation is None:
        return text + ONE_SEED
    spreads = [spread.deviation or 0.0 for spread in (baseline, *others.values())]
    return text + f", where seeds alone make it vary by ± {100 * max(spreads):.1f}."
