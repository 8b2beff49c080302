"""The ``floatplan`` command. Loads neither torch nor plotly until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import cast

import typer

from floatplan.cli.app import app
from floatplan.errors import FloatplanError

MISUSE = 2
INTERRUPTED = 130

# Typer raises the errors of the click that it uses, its own copy or the package; this is their common base.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a training failed, 2 bad input in one line on stderr.

    130 and 143: stopped by SIGINT or SIGTERM.
    """
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status of a command line; ``None`` takes the process's own."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without a sign shows another in its place
            stream.reconfigure(errors="replace")
    try:
        given = None if arguments is None else list(arguments)
        status = typer.main.get_command(app).main(args=given, prog_name="floatplan", standalone_mode=False)
    except FloatplanError as error:
        return _complain(str(error))
    except _UsageError as error:
        return _complain(error.format_message()) if error.format_message() else MISUSE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    print(f"floatplan: {' '.join(message.split())}", file=sys.stderr)
    return MISUSE
