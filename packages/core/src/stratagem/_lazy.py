"""Names that a package imports when they are first used (PEP 562), to stay cheap to import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package that serves names lazily.

    Args:
        package: its name.
        homes: by module, the names that it defines, in one string.
    """
    modules = by_name(homes)
    names = sorted(modules)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function the next time
        return value

    return find, lambda: list(names), names


def by_name(homes: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name."""
    return {name: module for module, names in homes.items() for name in names.split()}
