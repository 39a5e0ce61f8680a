"""Parsers and tables of the commands. Cells are folded to fit a terminal, never truncated."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from operator import gt
from typing import TypeVar

from stratagem.errors import format_text

_WIDEST = 20_000
"""The maximum width of a cell: a list of all names in a checkpoint has 16,000 characters."""

_COLORS = {"yes": 32, "ok": 32, "loaded": 32, "no": 33, "warning": 33}
_COLORS |= {"error": 31, "broken": 31, "incompatible": 31}
"""The ANSI colors (green, yellow, red) of cells that state a status, by the cell's first word."""

Number = TypeVar("Number", int, float)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Folds the paragraphs of a description, but none with an indented line, such as a command.

    The width is explicit, since argparse would import shutil, bz2 and lzma to find it.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            each if "\n " in f"\n{each}" else "\n".join(_folded(each, min(width, 98)))
            for each in paragraphs
        )


def parser_of(command: str, description: str, *, json: bool = True) -> argparse.ArgumentParser:
    """Return a parser for a command's arguments.

    Args:
        command: the name of the command.
        description: the text of `--help`; paragraphs without indented lines are folded.
        json: whether the command accepts `--json`.
    """
    parser = argparse.ArgumentParser(
        prog=f"stratagem {command}",
        description=description,
        formatter_class=HelpFormatter,
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


def terminal_width(otherwise: int = 80) -> int:
    """Return the number of columns to print on: COLUMNS, or the width of the terminal.

    Args:
        otherwise: the number if both are unknown.
    """
    try:
        columns = int(os.environ.get("COLUMNS") or 0)
        return columns or os.get_terminal_size().columns or otherwise
    except (ValueError, OSError):
        return otherwise


def table_width() -> int:
    """Return the number of columns that a table may fill: 100 without a terminal or COLUMNS."""
    return terminal_width(100)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their headers, folded to `table_width`.

    On a terminal the headers and statuses have colors unless NO_COLOR is set. Programs read
    `--json`, or set COLUMNS to a large number, so that each row is a single line.
    """
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    color = color and os.environ.get("TERM") != "dumb"
    print(aligned([headers, *rows], table_width(), color=color))


def print_reasons(title: str, reasons: Iterable[tuple[str, str]]) -> None:
    """Print each reason once, with the names that it holds for.

    Args:
        title: the header of the names.
        reasons: pairs of a name and its reason; pairs without a reason are omitted.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    names.pop("", None)
    if names:
        print()
        print_table((title, "because"), [(", ".join(who), why) for why, who in names.items()])


def aligned(rows: Sequence[Sequence[str]], width: int | None = None, *, color: bool = False) -> str:
    """Return rows as text, their columns aligned by spaces.

    Args:
        rows: the rows; the first has the headers if `color` is True.
        width: the columns of the terminal, to which the widest cells are folded; None: no limit.
        color: whether to print the headers in bold type, and statuses in color.
    """
    cells = [[_one_line(cell) for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        words = [max(map(len, " ".join(column).split(" ")), default=0) for column in columns]
        # Keep words whole while they fit, and then all except long ones, such as paths.
        for least in (words, [min(word, 16) for word in words], [8] * len(words)):
            while sum(widths) + 2 * (len(widths) - 1) > width and any(map(gt, widths, least)):
                widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
                widths[widest] -= 1
    lines = []
    for number, row in enumerate(cells):
        codes = [1 if number == 0 else _COLORS.get(cell.partition(" ")[0], 0) for cell in row]
        for parts in zip_longest(*map(_folded, row, widths), fillvalue=""):
            line = [part.ljust(size) for part, size in zip(parts, widths, strict=True)]
            if color:
                painted = zip(codes, line, strict=True)
                line = [f"\x1b[{c}m{t}\x1b[0m" if c and t.strip() else t for c, t in painted]
            lines.append("  ".join(line).rstrip())
    return "\n".join(lines).replace("\xa0", " ")


def _folded(cell: str, width: int) -> list[str]:
    """Return the lines of a cell, broken between words where possible."""
    if len(cell) <= width:
        return [cell]
    from textwrap import wrap

    return wrap(cell, width, break_on_hyphens=False)  # a command stays whole


_SPACE_IN_SIZE = re.compile(r"(?<=\d) (?=[KMGT]iB\b)")


def _one_line(text: str) -> str:
    return _SPACE_IN_SIZE.sub("\xa0", format_text(" ".join(text.split()), _WIDEST))
