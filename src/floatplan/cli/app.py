"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from floatplan._version import __version__
from floatplan.cli.compare import compare
from floatplan.cli.doctor import doctor
from floatplan.cli.explain import explain
from floatplan.cli.replay import replay
from floatplan.cli.report import report
from floatplan.cli.train import train

app = typer.Typer(
    name="floatplan",
    help="Mixed-precision training for PyTorch: compare precisions on real data, see what a machine can do.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(compare)
app.command()(doctor)
app.command()(explain)
app.command()(replay)
app.command()(report)
app.command()(train)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"floatplan {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the command itself."""
