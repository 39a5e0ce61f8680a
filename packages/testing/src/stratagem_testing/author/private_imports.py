"""What a plugin imports of core that is not public, by its source, and what is there instead."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import stratagem
from stratagem.discovery import find_module

_WITH_NAMES = (
    "stratagem",
    "stratagem_testing",
    "stratagem_torch.launch",
    "stratagem_torch.parallel",
    "stratagem_torch.sharding",
)
"""Public modules that are no rooms of core."""


@functools.cache
def public_modules() -> tuple[str, ...]:
    """Return the modules that users and authors of plugins import from.

    They are `stratagem`, its rooms (`stratagem.ROOM`) that list public names, `stratagem_testing`,
    and three modules of `stratagem_torch`. A name is public if its module lists it.

    Example:
        >>> "stratagem.strategies" in public_modules(), "stratagem.one_device" in public_modules()
        (True, False)
    """
    rooms = (f"stratagem.{room.name}" for room in pkgutil.iter_modules(stratagem.__path__))
    return ("stratagem", *filter(_lists_names, rooms), *_WITH_NAMES[1:])


def _lists_names(module: str) -> bool:
    """Whether a module is public; only this one is imported, since some rooms import torch."""
    package, _, room = module.rpartition(".")
    if package != "stratagem" or room.startswith("_"):
        return module in _WITH_NAMES
    return importlib.util.find_spec(module) is not None and bool(names_of(module))


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """Return the names that a module lists, in `__all__` or in a `__dir__` of its own."""
    found = importlib.import_module(module)
    # Not by getattr: a list that is computed on access imports any installed package.
    listed: list[str] | None = vars(found).get("__all__")
    if listed is None:
        listed = dir(found) if "__dir__" in vars(found) else []
    return frozenset(listed)


def private_imports(named: Iterable[str]) -> list[str]:
    """Return a sentence for each import of a name that any release may change.

    Args:
        named: modules, or places in them ("package.module:name"), of one distribution; all of a
            package is looked at.
    """
    return [sentence for path in sources_of(named) for sentence in private_imports_of(path)]


def sources_of(named: Iterable[str]) -> list[Path]:
    """Return the files of the packages of modules, or of places in them ("package.module:name")."""
    packages = dict.fromkeys(each.partition(":")[0].partition(".")[0] for each in named)
    return list(dict.fromkeys(path for package in packages for path in _files_of(package)))


def private_imports_of(path: Path) -> list[str]:
    """Return the same for a file; nothing of one that is no Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    # The torch backend uses its own modules.
    ours = {"stratagem"} if "stratagem_torch" in path.parts else {"stratagem", "stratagem_torch"}
    return [
        f"{path.name}, line {line}: {module}{f' {name}' if name else ''} is not public, and may "
        f"change in any release{_instead_of(name)}"
        for line, module, name in _imported(tree)
        if module.partition(".")[0] in ours and not _is_public(module, name)
    ]


def _files_of(package: str) -> list[Path]:
    found = find_module(package)
    if isinstance(found, str):
        return []
    folders = found.submodule_search_locations
    if folders is None:
        origin = found.origin or ""
        return [Path(origin)] if origin.endswith(".py") else []
    return [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]


def _imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) of each import; the name "" stands for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def _is_public(module: str, name: str) -> bool:
    if name and _lists_names(f"{module}.{name}"):
        return True
    return _lists_names(module) and (name in ("", "*") or name in names_of(module))


def _instead_of(name: str) -> str:
    """Return where a name can be imported from instead, or ""."""
    for module in public_modules() if name and not name.startswith("_") else ():
        if name in names_of(module):
            return f": import {name} from {module}"
    return ""
