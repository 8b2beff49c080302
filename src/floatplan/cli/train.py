"""``floatplan train``: train a task, and go on where it stopped."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatplan.cli.folders import new_folder
from floatplan.cli.options import TASK_HELP
from floatplan.errors import FloatplanError, PrecisionWarning, TaskError

if TYPE_CHECKING:
    from floatplan.tasks.training import Training
    from floatplan.watch.steps import Sink

FAILED = 1
SIGNALLED = 128
"""Plus the number of the signal: the exit status of a training that was stopped by one."""


def train(
    task: Annotated[str | None, typer.Option(help=f"{TASK_HELP}  [default: digits]")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, auto, or a plan (TOML).  [default: bf16]")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per step.  [default: 1]")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest norm of a step's gradients.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training data.  [default: the task's]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per micro-batch.  [default: the task's]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.  [default: the task's]")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and the order of the data.  [default: 0]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: cpu]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new run folder.  [default: runs/TASK-DATE-TIME]")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.  [default: at the end]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, with its options.")
    ] = False,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations.  [default: at the end]")
    ] = None,
    record: Annotated[
        bool | None, typer.Option("--record/--no-record", help="Write run.jsonl and a report.  [default: on]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data that does not ship with a package.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
) -> None:
    """Train a task with fp.Amp: recorded, with checkpoints; stop it with Ctrl-C, and go on with --resume."""
    asked = {name: value for name, value in locals().items() if name not in ("out", "resume", "quiet")}
    if resume and out is None:
        raise TaskError("--resume needs the folder of the training to go on with; name it with --out")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # the notes at the end say the same
        training, say = _prepare(asked, out or new_folder(task or "digits"), resume, quiet)
        _run(training, say)


def _prepare(
    asked: dict[str, Any], folder: Path, resume: bool, quiet: bool
) -> tuple[Training, Callable[[str], None]]:
    """The training, and what prints a line beside its view."""
    from floatplan.cli.console import make_console, print_lines
    from floatplan.report.live import view_for
    from floatplan.tasks.options import TrainingOptions, precision_named
    from floatplan.tasks.training import Training
    from floatplan.tune.host import tune_host

    tune_host()
    if asked["precision"] is not None:
        asked["precision"] = precision_named(asked["precision"])
    if asked["data"] is not None:
        asked["data"] = str(asked["data"])
    console = make_console()

    def view(training: Training) -> Sink:
        return view_for(console, training.total, training.memory.peak)

    training = Training(TrainingOptions(**asked), folder, None if quiet else view, resume=resume)
    return training, lambda line: None if quiet else print_lines(console, [line])


def _run(training: Training, say: Callable[[str], None]) -> None:
    """Train, and print how it ended; leaves by `typer.Exit` where it did not reach the end."""
    from floatplan.cli.console import make_console, print_lines
    from floatplan.tasks.stopping import StopWish

    with StopWish() as wish:
        try:
            is_over = training.run(wish, say)
        except Exception as error:
            print(f"floatplan: {_failure(training, error)}", file=sys.stderr)
            raise typer.Exit(FAILED) from error
    if is_over:
        print_lines(make_console(), _summary(training))
        return
    assert wish.signal is not None
    of = "" if training.total is None else f" of {training.total:,}"
    print_lines(
        make_console(),
        [f"stopped by {wish.signal.name} after step {training.steps:,}{of}; go on with: {_go_on(training)}"],
    )
    raise typer.Exit(SIGNALLED + wish.signal)


def _go_on(training: Training) -> str:
    return f"floatplan train --resume --out {shlex.quote(str(training.folder))}"


def _failure(training: Training, error: Exception) -> str:
    from floatplan.tasks.function import what_was_raised

    text = " ".join(str(error).split()) if isinstance(error, FloatplanError) else what_was_raised(error)
    hint = (
        f"; go on from the last checkpoint with: {_go_on(training)}" if training.checkpoint.exists() else ""
    )
    return f"the training failed after step {training.steps:,}: {text}{hint}"


def _summary(training: Training) -> Iterator[str]:
    """What the training came to, in words, and where it is kept."""
    if training.options.record:
        yield from _recorded(training)
    else:
        yield f"{training.steps:,} steps"
    if training.evaluations:
        step, accuracy = training.evaluations[-1]
        yield f"accuracy {100 * accuracy:.2f} % after step {step:,}"
    yield from (f"- {note}" for note in training.notes())
    yield f"checkpoint: {training.checkpoint}"


def _recorded(training: Training) -> Iterator[str]:
    from floatplan.report.html import PlotlyMissing
    from floatplan.report.runfile import TrainingRun, read_run
    from floatplan.report.training import TOPICS, about, title_of, write_training_report
    from floatplan.report.verdict import verdict

    run = read_run(training.folder)
    assert isinstance(run, TrainingRun)
    found = verdict(run)
    yield f"{title_of(run)}: {about(run)}"
    yield from (f"! {problem}" for problem in run.problems)
    yield found.headline
    yield from (f"- {TOPICS[one.topic]}: {one.text}" for one in found.statements)
    try:
        yield f"report: {write_training_report(run, training.folder)}"
    except PlotlyMissing as error:
        yield f"no report: {error}. Then: floatplan report {shlex.quote(str(training.folder))}"
