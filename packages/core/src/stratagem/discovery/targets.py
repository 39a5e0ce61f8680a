"""Whether a target `"package.module:name"` is there, by its source: nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Set
from importlib.machinery import ModuleSpec

_DEFINED = re.compile(rb"^(?:class|def) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(rb"^(?:import|from) (\w+)", re.MULTILINE)


def find_module(module: str) -> ModuleSpec | str:
    """Return where a module lies, or why it cannot be found; it is not executed."""
    try:
        found = importlib.util.find_spec(module)
    # A package above it may raise whatever a vendor's SDK raises.
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return f"there is no module {module}" if found is None else found


def why_missing(target: object, *, what: str = "target") -> str:
    """Return why a target `"package.module:Class"` is not there, as far as its source shows.

    "": it is there, or only an import would show.

    Args:
        target: what a spec has; what is no string is there.
        what: which field of the spec it is.

    Example:
        >>> from stratagem.discovery.targets import why_missing
        >>> why_missing("stratagem.native.strategies.ddp:DPDStrategy")
        "its target's module stratagem.native.strategies.ddp defines no 'DPDStrategy'"
    """
    if not isinstance(target, str):
        return ""
    module, _, attribute = target.partition(":")
    found = find_module(module)
    if isinstance(found, str):
        return f"its {what} {target!r} cannot be found: {found}"
    if found.origin is None or not found.origin.endswith(".py"):
        return ""
    name = attribute.partition(".")[0]
    try:
        changed = os.stat(found.origin).st_mtime_ns  # noqa: PTH116 - pathlib is slow to import
        imported, defined = _names_in(found.origin, changed)
        if missing := _missing(imported):
            return (
                f"its {what}'s module {module} imports {' and '.join(missing)}, which is not "
                "installed"
            )
        # Where it mostly is; parsing a module takes longer than the rest of doctor together.
        if name in defined:
            return ""
        names = set(_defined(ast.parse(_read(found.origin))))
    except (OSError, SyntaxError, ValueError) as error:
        return f"its {what}'s module {module} cannot be read: {type(error).__name__}: {error}"
    # What these define, only an import would show.
    if {"*", "__getattr__", name} & names:
        return ""
    return f"its {what}'s module {module} defines no {name!r}"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
        return file.read()


@functools.lru_cache(maxsize=64)
def _names_in(path: str, changed: int) -> tuple[set[str], set[str]]:
    """Return what a module imports in any case, at its top, and the functions and classes there.

    Args:
        path: its file.
        changed: when that was changed last; several specs name one file.
    """
    source = _read(path)
    imported = {name.decode() for name in _IMPORTED.findall(source)}
    return imported, {name.decode() for name in _DEFINED.findall(source)}


def _missing(imported: Set[str]) -> list[str]:
    """Return the packages that are not there."""
    unknown = sorted(imported - sys.stdlib_module_names - sys.modules.keys())
    return [name for name in unknown if isinstance(find_module(name), str)]


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds, also within `if`, `try` and `with`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        else:
            yield from _defined(node)
