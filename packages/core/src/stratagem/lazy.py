"""Names that a package imports when they are first used (PEP 562), to stay cheap to import."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazy_exports", "lazy_names", "reexports"]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package that serves names lazily.

    Args:
        package: its name; `reexports` returns the names that it serves.
    """
    modules = reexports(package)
    names = sorted(modules)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function the next time
        return value

    return find, lambda: list(names), names


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package to which other distributions add names.

    The registry, and pluggy with it, is imported only for names that are not the package's own:
    `stratagem run` needs neither.

    Args:
        package: its name.
    """
    find_own, _, own = lazy_names(package)

    def of_all() -> Any:
        return importlib.import_module("stratagem.discovery.exports").exporter(package, None)

    def find(name: str) -> Any:
        return find_own(name) if name in own else of_all()[0](name)

    return find, lambda: of_all()[1]()


def reexports(package: str) -> dict[str, str]:
    """Return the module of each name that a module re-exports, by `from MODULE import X as X`.

    Most of these statements stand under `if TYPE_CHECKING`. They are read from the module's source,
    so that a type checker and the import system have one list. Names that another distribution
    defines are left out: they are found through its specs.
    """
    spec: Any = sys.modules[package].__spec__
    body = ast.parse(spec.loader.get_source(package)).body
    prefix = f"{package.partition('.')[0]}."
    blocks = (node.body for node in body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module)
        for node in (*body, *(inner for block in blocks for inner in block))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(prefix)
        for alias in node.names
        if alias.asname == alias.name
    }
