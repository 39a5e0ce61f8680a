"""The values of an evaluation as `validate` and `test` return and print them."""

from __future__ import annotations

import sys
from collections.abc import Mapping


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

    table = Table(title=stage)
    table.add_column("value")
    table.add_column("", justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:.6g}")
    Console(file=sys.stdout).print(table)
