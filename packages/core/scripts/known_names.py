"""Writes stratagem/discovery/known_names.txt: the names that the other distributions provide.

    python packages/core/scripts/known_names.py    # after a guest's specs changed

All distributions of this repository have to be installed.
packages/core/tests/discovery/test_hints.py compares the file with their specs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.discovery import CORE, NameSpec, get_registry

FILE = Path(__file__).parents[1] / "src/stratagem/discovery/known_names.txt"
ROOMS = {
    "strategy": "strategies",
    "accelerator": "accelerators",
    "precision": "precision",
    "checkpoint_io": "checkpoint",
    "cluster_environment": "environments",
    "logger": "loggers",
    "callback": "callbacks",
    "profiler": "profilers",
}
"""The module that serves the classes of a kind."""


def known_names() -> dict[tuple[str, str], list[str]]:
    """Return the names that our installed distributions other than core provide, sorted."""
    found: dict[tuple[str, str], set[str]] = {}
    registry = get_registry()
    for kind in (*ROOMS, "launcher", "name"):
        for candidate in registry.candidates(kind):
            who, spec = candidate.distribution, candidate.spec
            if who == CORE or not who.startswith("stratagem-"):
                continue
            if isinstance(spec, NameSpec):
                found.setdefault((who, spec.module), set()).add(spec.import_name)
                continue
            names = {name.casefold() for name in (spec.name, *spec.aliases)}
            # An alias that several share, "gpu", stands with the first of them.
            others = [found[key] for key in found if key[1] == kind and key[0] != who]
            found.setdefault((who, kind), set()).update(names.difference(*others))
            if kind in ROOMS:
                found.setdefault((who, f"stratagem.{ROOMS[kind]}"), set()).add(spec.class_name)
    for implementation in registry.plugins.hook.stratagem_cli.get_hookimpls():
        who = str(implementation.plugin_name).partition(":")[0]
        if who != CORE and who.startswith("stratagem-"):
            commands: Any = implementation.function()
            found.setdefault((who, "command"), set()).update(each.name for each in commands)
    return {key: sorted(found[key]) for key in sorted(found)}


def as_text(names: dict[tuple[str, str], list[str]]) -> str:
    """Return the file's text: a row for each distribution and kind."""
    rows = (f"{who} {kind}: {', '.join(of_kind)}\n" for (who, kind), of_kind in names.items())
    return "".join(rows)


if __name__ == "__main__":
    FILE.write_text(as_text(known_names()))
