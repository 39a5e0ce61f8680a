"""Tables: drawn by rich on a terminal, aligned text elsewhere; nothing is ever cut off."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their headers.

    On a terminal, cells are folded to its width. Elsewhere a row is one line, whatever its length,
    so that `grep` and the like find it whole.
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
    return " ".join(text.split())


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
