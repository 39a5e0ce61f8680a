"""The tables of what the kits check, as docs/extend/kit-checks.md has them.

Run: python -m stratagem_testing.guide docs/extend/kit-checks.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from stratagem_testing.components.check import MODULES, checks_of
from stratagem_testing.strategies.check import CHECKS
from stratagem_testing.strategies.checks import load_checks

BEGIN, END = "<!-- the tables: python -m stratagem_testing.guide -->", "<!-- the end -->"


def tables() -> str:
    """Return a table for each kit: its checks, and the duty that each tests."""
    load_checks()
    kits = [("strategy", ((name, check.about) for name, check in CHECKS.items()))]
    kits += [
        (kind, ((name, check.about) for name, check in checks_of(kind).items())) for kind in MODULES
    ]
    return "\n".join(_table(kind, checks) for kind, checks in kits)


def _table(kind: str, checks: Iterable[tuple[str, str]]) -> str:
    title = f"## `{class_name(kind)}`"
    rows = [f"| `{name}` | {about} |" for name, about in checks]
    return "\n".join(
        [title, "", "| check | what a component that passes it does |", "|---|---|", *rows, ""]
    )


def class_name(kind: str) -> str:
    """Return the name of a kit's class.

    Example:
        >>> class_name("checkpoint_io")
        'CheckpointIOConformance'
    """
    return "".join(p.capitalize() for p in kind.split("_")).replace("Io", "IO") + "Conformance"


def main(path: str) -> None:
    """Put the tables into a guide."""
    file = Path(path)
    before, _, rest = file.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    file.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
