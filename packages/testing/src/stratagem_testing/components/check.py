"""Check: one thing that every component of a kind must do, and the registry of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stratagem_testing.reports import sentence_of

if TYPE_CHECKING:
    from stratagem_testing.components.bench import Bench

Run = Callable[["Bench"], None]
"""Raises AssertionError with what is wrong."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "accelerator": ("accelerator", "accelerator_memory"),
    "precision": ("precision", "precision_training"),
    "checkpoint_io": ("checkpoint_io", "checkpoint_io_safety"),
    "cluster_environment": ("cluster_environment",),
    "launcher": ("launcher",),
    "logger": ("logger",),
    "callback": ("callback",),
    "profiler": ("profiler",),
    "plugin": ("plugin",),
}
"""Where the checks of a kind are, in the order in which they run."""


@dataclass(frozen=True)
class Check:
    """A duty of every component of a kind.

    Attributes:
        name: "group/what".
        about: the behaviour of a component that passes.
        run: the function of the check; runs in a separate process.
        slow: the check starts processes, or takes seconds for another reason.
        needs_device: of an accelerator: the check needs a device.
    """

    name: str
    about: str
    run: Run
    slow: bool = False
    needs_device: bool = False


_CHECKS: dict[str, dict[str, Check]] = {kind: {} for kind in MODULES}


def check(
    kind: str, name: str, *, slow: bool = False, needs_device: bool = False
) -> Callable[[Run], Run]:
    """Make the decorated function a check, which its docstring describes; see `Check`."""

    def register(run: Run) -> Run:
        _CHECKS[kind][name] = Check(name, sentence_of(run), run, slow, needs_device)
        return run

    return register


def checks_of(kind: str) -> Mapping[str, Check]:
    """Return the checks of a kind by their names, in the order in which they run."""
    for module in MODULES[kind]:
        importlib.import_module(f"stratagem_testing.components.checks.{module}")
    return _CHECKS[kind]
