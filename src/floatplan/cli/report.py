"""``floatplan report``: write a run folder's page again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="A run folder that compare wrote.")]) -> None:
    """Write report.html again from run.jsonl, also of a run that was stopped."""
    from floatplan.errors import RunFolderError
    from floatplan.report.html import write_report
    from floatplan.report.runfile import Run, read_run

    found = read_run(run)
    if not isinstance(found, Run):
        raise RunFolderError(f"{run} holds a recorded training")
    print(f"report: {write_report(found, run)}")
