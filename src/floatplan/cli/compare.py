"""``floatplan compare``: train the same network in several precisions and set them side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floatplan.cli.folders import new_folder
from floatplan.cli.options import TASK_HELP
from floatplan.errors import TaskError

if TYPE_CHECKING:
    from rich.console import Console

    from floatplan.report.runfile import Run, RunWriter
    from floatplan.tasks import Comparison

A_TRAINING_FAILED = 1


def compare(
    task: Annotated[str, typer.Option(help=TASK_HELP)] = "digits",
    rows: Annotated[
        str,
        typer.Option(
            help="Comma-separated: fp32, bf16, fp16, fp16-unscaled, floatplan, auto, torch-bf16, torch-fp16."
        ),
    ] = "fp32,bf16,fp16",
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training data.  [default: the task's]")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.  [default: the task's]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    seeds: Annotated[str, typer.Option(help="Comma-separated; several give mean and spread.")] = "0",
    out: Annotated[
        Path | None, typer.Option(help="A new run folder.  [default: runs/TASK-DATE-TIME]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data that does not ship with a package.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch such data into its folder.")] = False,
    no_drift: Annotated[
        bool, typer.Option("--no-drift", help="Do not compare low rows with float32, module by module.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
) -> None:
    """Train in float32, bf16 and fp16, and compare time, memory, loss and accuracy."""
    from floatplan.cli.console import make_console
    from floatplan.report.runfile import RunWriter
    from floatplan.tasks import DataSource, Request, plan_comparison

    console = make_console()
    plan = plan_comparison(
        Request(
            task=task,
            rows=_listed(rows),
            seeds=_numbers(seeds),
            epochs=epochs,
            batch_size=batch_size,
            device=device,
            data=DataSource(data, download),
            drifts=not no_drift,
        )
    )
    folder = out or new_folder(plan.recipe.name)
    with RunWriter(folder) as writer:
        run = _train(plan, writer, console, quiet)
    show(run, folder, console)
    if run.failures:
        raise typer.Exit(A_TRAINING_FAILED)


def _train(plan: Comparison, writer: RunWriter, console: Console, quiet: bool) -> Run:
    """Run the plan; each record goes to the file and to the view."""
    from floatplan.cli.console import print_lines
    from floatplan.cli.progress import view_for
    from floatplan.report.runfile import collect
    from floatplan.tasks import run_comparison

    header = plan.header()
    writer.write(header)
    view = view_for(
        console,
        quiet=quiet,
        epochs=plan.epochs,
        steps_per_epoch=plan.steps_per_epoch,
        examples_per_step=plan.examples_per_step,
    )
    records = []
    trainings = run_comparison(plan)
    try:
        with view.running():
            for record in trainings:
                writer.write(record)
                records.append(record)
                view.show(record)
    except KeyboardInterrupt:
        print_lines(console, [f"stopped; what was written is in {writer.folder}"])
        raise
    finally:
        trainings.close()  # ends the training process, if one is left
    return collect(header, records)


def show(run: Run, folder: Path, console: Console) -> None:
    """Print the comparison, and where the report is."""
    from floatplan.cli.console import print_lines
    from floatplan.report.html import PlotlyMissing, write_report

    console.print()
    print_comparison(run, console)
    try:
        where = f"report: {write_report(run, folder)}"
    except PlotlyMissing as error:
        where = f"no report: {error}. Then: floatplan report {folder}"
    print_lines(console, [where])


def print_comparison(run: Run, console: Console) -> None:
    """Print the table, what it needs said, and the conclusion."""
    from floatplan.cli.console import print_lines
    from floatplan.report.summary import conclusion, notes
    from floatplan.report.text import comparison_table

    table = comparison_table(run)
    unbounded = console.options.update(max_width=10_000)
    fits = console.measure(table, options=unbounded).maximum <= console.width
    console.print(table if fits else comparison_table(run, upright=True))
    print_lines(console, (f"- {note}" for note in notes(run)))
    print_lines(console, [f"! {problem}" for problem in run.problems])
    print_lines(console, [conclusion(run)])


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _listed(text))
    except ValueError:
        raise TaskError(
            f"seeds must be whole numbers with commas between, such as 0,1,2, not {text!r}"
        ) from None
