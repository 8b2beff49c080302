"""``floatplan report``: show what run folders hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatplan.errors import TaskError

if TYPE_CHECKING:
    from floatplan.report.runfile import AnyRun


def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders that compare or a recorded training wrote.")],
    text: Annotated[bool, typer.Option("--text", help="Print it, and write no page.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and write no page.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write.  [default: report.html in the run folder, or here for several]"
        ),
    ] = None,
) -> None:
    """Show a run, also one that was stopped, as a page, text or JSON; several trainings side by side."""
    from floatplan.report.runfile import read_run

    if text + json + (out is not None) > 1:
        raise TaskError("--text, --json and --out exclude each other; write one of them")
    found = {folder: read_run(folder) for folder in dict.fromkeys(run)}
    if text:
        _print_text(found)
    elif json:
        _print_json(found)
    else:
        print(f"report: {_write(found, out)}")


def _write(found: dict[Path, AnyRun], out: Path | None) -> Path:
    from floatplan.report.html import render
    from floatplan.report.runfile import REPORT_FILE, Run
    from floatplan.report.several import render_trainings, trainings_of
    from floatplan.report.training import render_training, write_page

    if len(found) > 1:
        return write_page(render_trainings(trainings_of(found)), out or Path(REPORT_FILE))
    ((folder, run),) = found.items()
    page = render(run) if isinstance(run, Run) else render_training(run)
    return write_page(page, out or folder / REPORT_FILE)


def _print_text(found: dict[Path, AnyRun]) -> None:
    from floatplan.cli.compare import print_comparison
    from floatplan.cli.console import make_console, print_lines
    from floatplan.report.runfile import Run
    from floatplan.report.several import trainings_of
    from floatplan.report.several_text import several_lines
    from floatplan.report.training_text import training_lines

    console = make_console()
    runs = list(found.values())
    if len(runs) == 1 and isinstance(runs[0], Run):
        print_comparison(runs[0], console)
        return
    shown = trainings_of(found)
    for line in training_lines(*shown.values()) if len(shown) == 1 else several_lines(shown):
        if isinstance(line, str):
            print_lines(console, [line])
        else:
            console.print(line)


def _print_json(found: dict[Path, AnyRun]) -> None:
    import json

    from floatplan.report.comparison_json import comparison_json
    from floatplan.report.runfile import Run
    from floatplan.report.several import trainings_json, trainings_of
    from floatplan.report.training_json import training_json

    (first, *more) = found.values()
    values: dict[str, Any]
    if more:
        values = trainings_json(trainings_of(found))
    else:
        values = comparison_json(first) if isinstance(first, Run) else training_json(first)
    print(json.dumps(values, allow_nan=False, ensure_ascii=False))
