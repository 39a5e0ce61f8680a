"""The checks, by what they look at; `load_checks` registers all of them, in the order of a run."""

from __future__ import annotations

import importlib

MODULES = (
    "plugin",
    "numbers",
    "steps",
    "optimizers",
    "collectives",
    "data",
    "state",
    "nodes",
    "lite",
    "life",
    "capabilities",
    "end",
)


def load_checks() -> None:
    """Register all checks; once, and in one order in every process."""
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
