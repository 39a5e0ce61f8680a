"""The values of an evaluation as `validate` and `test` return and print them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from stratagem.launch.streams import printable


def by_loader(values: Mapping[str, float], count: int) -> list[dict[str, float]]:
    """Return the values of each of `count` loaders; what is logged for all is in each dict."""
    if count == 1:
        return [dict(values)]
    suffixes = [f"/dataloader_idx_{index}" for index in range(count)]
    return [
        {
            name: value
            for name, value in values.items()
            if name.endswith(suffix) or not name.endswith(tuple(suffixes))
        }
        for suffix in suffixes
    ]


def print_values(stage: str, values: Mapping[str, float]) -> None:
    """Print a table of the values."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    table = Table(title=stage)
    table.add_column("value")
    table.add_column("", justify="right")
    for name, value in values.items():
        # As Text, so that brackets in a name are not read as rich's markup.
        table.add_row(Text(printable(name, console.encoding)), f"{value:.6g}")
    console.print(table)
