"""Parsers and tables of the commands. Cells are never truncated to fit a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from stratagem.errors import format_text

_WIDEST = 20_000
"""The maximum width of a cell: a list of all names in a checkpoint has 16,000 characters."""

Number = TypeVar("Number", int, float)


def parser_of(command: str, description: str, *, json: bool = True) -> argparse.ArgumentParser:
    """Return a parser for a command's arguments.

    Args:
        command: the name of the command.
        description: the text of `--help`; its lines are not wrapped.
        json: whether the command accepts `--json`.
    """
    parser = argparse.ArgumentParser(
        prog=f"stratagem {command}",
        description=description,
        formatter_class=_formatter,
        # A new option with the same prefix must not change the meaning of an abbreviation.
        allow_abbrev=False,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def at_least(lowest: Number) -> Callable[[str], Number]:
    """Return the `type` of an option that accepts numbers from `lowest` on.

    They are whole numbers if `lowest` is one.
    """
    kind = type(lowest)
    what = "a whole number" if kind is int else "a number"

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= lowest:
            raise argparse.ArgumentTypeError(
                f"expected {what} of at least {lowest}, received {text!r}"
            )
        return value

    return number


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return the help formatter; an explicit width avoids importing shutil, bz2 and lzma."""
    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        width = 80
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their headers.

    On a terminal, cells are folded to its width. Elsewhere each row is a single line of any length,
    so that `grep` finds the whole row.
    """
    if sys.stdout.isatty():
        _draw(headers, rows)
    else:
        print(aligned([headers, *rows]))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, their columns aligned by spaces."""
    lines = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def _one_line(text: str) -> str:
    return format_text(" ".join(text.split()), _WIDEST)


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        # As Text, so that brackets in a name or an error are not read as rich's markup.
        table.add_row(*(Text(_one_line(cell)) for cell in row))
    Console().print(table)
