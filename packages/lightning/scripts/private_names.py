"""Writes docs/reference/private-names.md from private-names.tsv beside it.

    python packages/lightning/scripts/private_names.py

A row has: how a project uses the name (`override`, `read` or `import`), the name, who uses it, and
what happens here: "works", or words of the error that says what to do. The tests of this package
check each row.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[3] / "docs/reference/private-names.md"
ROWS = PAGE.with_suffix(".tsv")
HEAD = """\
# Private names of Lightning

Projects override, read and import names that Lightning means for itself, most of them with an
underscore. In a run [with Lightning's names](../start/from-lightning.md) each of these works, or
raises an error that says what to do. The second column has projects that are known to use the name.

"""
TITLES = {
    "override": ("Overridden", "A subclass overrides it, and a run calls the override."),
    "read": ("Read or called", "In a hook of a fit."),
    "import": ("Imported", "From `lightning`."),
}


class Row(NamedTuple):
    """A name.

    Args:
        how: "override", "read" or "import".
        name: the name.
        by: projects that use it; "": several.
        here: "works", or words of the error.
    """

    how: str
    name: str
    by: str
    here: str


def rows() -> list[Row]:
    """Return all rows."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def page() -> str:
    """Return the text of the page."""
    text = HEAD
    for how, (title, explained) in TITLES.items():
        text += f"## {title}\n\n{explained}\n\n| name | projects | here |\n|---|---|---|\n"
        for row in rows():
            if row.how == how:
                here = row.here if row.here == "works" else f'error: "{row.here}"'
                text += f"| `{row.name}` | {row.by} | {here} |\n"
        text += "\n"
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
