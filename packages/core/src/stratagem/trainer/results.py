"""The values of an evaluation as `validate` and `test` return and print them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from stratagem.launch.streams import printable


def by_loader(
    values: Mapping[str, float], loaders: Mapping[str, Collection[int]], count: int
) -> list[dict[str, float]]:
    """Return the values of each of `count` loaders.

    Args:
        values: of all.
        loaders: the indices of the loaders that a value is of; of all, if its name is not there.
        count: how many loaders there are.
    """
    everywhere = range(count)
    return [
        {name: value for name, value in values.items() if index in loaders.get(name, everywhere)}
        for index in range(count)
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
