"""Places: how a process that was started for a test finds what the test's author has written."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stratagem.discovery import GROUP
from stratagem.errors import ConfigurationError


def is_place(told: str) -> bool:
    """Whether it names the place of a class or function, not a component.

    Example:
        >>> is_place("my_package.strategy:Mine"), is_place("ddp"), is_place("my-package:ddp")
        (True, False, False)
    """
    return ":" in told and "." in told


def find(place: str) -> Callable[..., Any]:
    """Return the object at "package.module:name" or "/path/of/file.py:name"."""
    module, _, name = place.rpartition(":")
    found: Any = _load(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    result: Callable[..., Any] = found
    return result


def place_of(told: str | Callable[..., Any]) -> str:
    """Return a name unchanged, and for a class or function a place where others find it.

    Raises:
        ConfigurationError: it was made in a function, where no other process can find it.
    """
    if isinstance(told, str):
        return told
    file, name = inspect.getfile(told), told.__qualname__
    if "<" in name:
        raise ConfigurationError(
            f"the kit was given {told!r}: it runs in other processes, which cannot find it there; "
            "expected a name, or a class or function at the top of a module"
        )
    try:
        found = importlib.util.find_spec(told.__module__)
    except (ImportError, ValueError):
        found = None
    # A test's module is often loaded from its file, under a name that cannot be imported.
    return f"{told.__module__ if found and _is_installed(found.name) else file}:{name}"


def _is_installed(module: str) -> bool:
    top = module.partition(".")[0]
    if top in importlib.metadata.packages_distributions():
        return True
    # An editable installation lists no packages, and a plugin's entry point names its own.
    entries = importlib.metadata.entry_points(group=GROUP)
    return any(entry.module.partition(".")[0] == top for entry in entries)


def _load(file: Path) -> ModuleType:
    # Under its own name: a process that a launcher spawns unpickles by that name, and has sys.path.
    if file.stem.isidentifier() and file.stem not in sys.modules:
        sys.path.insert(0, str(file.parent))
        return importlib.import_module(file.stem)
    own = sys.modules.get(file.stem)
    if own is not None and Path(getattr(own, "__file__", None) or "").resolve() == file.resolve():
        return own
    # Two files may have one name, as each of several distributions has a test_strategy.py.
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]
    name = f"_stratagem_conformance_{file.stem}_{place}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: its definitions are pickled by this name
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
    return sys.modules[name]
