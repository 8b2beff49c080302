"""``floatplan replay``: run a step again that went wrong, and say whether it goes wrong again."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from floatplan.cli.options import TASK_HELP
from floatplan.errors import PrecisionWarning, TaskError, nearest

NOT_REPRODUCED = 1
PRECISIONS = ("bf16", "fp16", "fp32")


def replay(
    bundle: Annotated[Path, typer.Argument(help="A folder that a replay bundle was written to.")],
    task: Annotated[str, typer.Option(help=f"Whose model and loss: {TASK_HELP}")],
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32.  [default: the bundle's]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of sentences.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data that does not ship with a package.")
    ] = None,
) -> None:
    """Run a step again that went wrong: status 0 if it goes wrong as recorded, 1 if not."""
    if precision is not None and precision not in PRECISIONS:
        hint = nearest(precision, PRECISIONS) or f"; there is: {', '.join(PRECISIONS)}"
        raise TaskError(f"--precision {precision!r} is not known{hint}")

    from floatplan.checkpoint import read_bundle
    from floatplan.cli.console import make_console, print_lines
    from floatplan.tasks import DataSource, Ingredients, recipe_named
    from floatplan.tasks.comparison import check_device
    from floatplan.tasks.replay import replay as run_again

    kept, where = read_bundle(bundle), check_device(device)
    made = recipe_named(task).prepare(Ingredients(where, source=DataSource(data)))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # the diagnosis notes the same
        result = run_again(kept, made, precision=precision, device=where)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2, allow_nan=False))
    else:
        print_lines(make_console(), result.sentences())
    if not result.reproduced:
        raise typer.Exit(NOT_REPRODUCED)
