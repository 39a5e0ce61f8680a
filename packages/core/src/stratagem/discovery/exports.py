"""Users' import names: `from stratagem.strategies import X` finds X in whatever is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from stratagem.discovery.entry_points import FIRST
from stratagem.discovery.hints import modules_of_import
from stratagem.discovery.registry import Candidate, get_registry
from stratagem.discovery.specs import NameSpec
from stratagem.errors import PluginError, StratagemError
from stratagem.lazy import reexports


def exporter(module: str, kind: str | None) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a module that serves one kind of component.

    Args:
        module: its name; it also serves the names that it re-exports.
        kind: the kind of component, to serve its classes by their own names; None: no kind.
    """
    modules = reexports(module)

    def find(name: str) -> Any:
        if name == "__all__":
            return [known for known in names() if _is_there(find, known)]
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        # A submodule is found by the import itself. A dotted path is no name, though jsonargparse
        # looks up "function.<locals>.Class".
        if name.startswith("_") or not name.isidentifier() or _is_submodule(module, name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # By target, since several names may mean one class with different arguments.
        offers = {c.spec.target: c for c in _offers(module, kind) if _import_name(c) == name}
        ours = [c for c in offers.values() if c.distribution in FIRST]
        if len(offers) > 1 and not ours:
            providers = sorted({c.distribution for c in offers.values()})
            places = sorted({str(target).partition(":")[0] for target in offers})
            raise ImportError(
                f"{' and '.join(providers)} both provide {module}.{name}: import it from one of "
                f"{', '.join(places)}, or uninstall one of them",
                name=module,
            )
        for candidate in ours or offers.values():
            try:
                return candidate.spec.load()
            except PluginError as error:
                raise ImportError(str(error), name=module) from error
        # Of an AttributeError, `from ... import` would show nothing but the name.
        if providers := get_registry().possible_providers(name, module):
            raise ImportError(f"{module!r} has no {name!r}. {' '.join(providers)}", name=module)
        if others := modules_of_import(name):
            raise ImportError(
                f"{module!r} has no {name!r}: import it from {' or '.join(others)}", name=module
            )
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}. It has: {', '.join(names())}."
        )

    def names() -> list[str]:
        return sorted({*modules, *(_import_name(c) for c in _offers(module, kind))})

    return find, names


def _is_submodule(module: str, name: str) -> bool:
    is_package = hasattr(sys.modules[module], "__path__")
    return is_package and importlib.util.find_spec(f"{module}.{name}") is not None


def _is_there(find: Callable[[str], Any], name: str) -> bool:
    """Whether a name can be imported: another distribution's class may lack what it needs."""
    try:
        find(name)
    except (ImportError, StratagemError):
        return False
    return True


def _offers(module: str, kind: str | None) -> list[Candidate]:
    """Return the components whose classes a module serves, and the names that guests add to it."""
    registry = get_registry()
    names = [c for c in registry.candidates("name") if getattr(c.spec, "module", "") == module]
    return names if kind is None else [*registry.candidates(kind), *names]


def _import_name(candidate: Candidate) -> str:
    spec = candidate.spec
    return spec.import_name if isinstance(spec, NameSpec) else spec.class_name
