"""Where commands print. Loads rich, so commands import it when they run."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

# A terminal has the width that it has; a pipe or a file takes a table as wide as it is.
WIDTH_WITHOUT_TERMINAL = 200


def make_console() -> Console:
    """A console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_WITHOUT_TERMINAL)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are: not cut, not coloured, brackets not read as markup."""
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
