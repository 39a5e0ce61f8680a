"""Users' import names: `from stratagem.strategies import X` finds X in whatever is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.discovery.hints import installation_hint


def exporter(
    module: str, kind: str, bases: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a module that serves one kind of component.

    Args:
        module: its name.
        kind: whose classes it serves, by their own names.
        bases: further names, each with the module that holds it.
    """

    def find(name: str) -> Any:
        if name in bases:
            return getattr(importlib.import_module(bases[name]), name)
        if not name.startswith("_"):
            for candidate in _candidates(kind):
                if candidate.spec.class_name == name:
                    return candidate.spec.load()
        hint = installation_hint(name)
        what = hint or f"It has: {', '.join(names())}."
        raise AttributeError(f"module {module!r} has no attribute {name!r}. {what}")

    def names() -> list[str]:
        return sorted({*bases, *(c.spec.class_name for c in _candidates(kind))})

    return find, names


def _candidates(kind: str) -> list[Any]:
    from stratagem.discovery.registry import get_registry

    return get_registry().candidates(kind)
