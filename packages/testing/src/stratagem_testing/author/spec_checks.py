"""What a spec promises that is not so: found without importing what it describes."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set

from stratagem.discovery import (
    ComponentSpec,
    LauncherSpec,
    PrecisionSpec,
    Registry,
    StrategySpec,
    installation_hint,
)
from stratagem.errors import ConfigurationError
from stratagem_testing.author.class_source import check_source, find_module

_COMPILES = ("model", "step")
"""What `Capabilities.compiles` may name."""
_DEFINED = re.compile(rb"^(?:class|def) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(rb"^(?:import|from) (\w+)", re.MULTILINE)


def check_spec(spec: ComponentSpec, registry: Registry) -> Iterator[str]:
    """Yield what is wrong with a spec: what it names that is not there, what its class contradicts.

    A target's module is found and parsed, and not executed: it may need an SDK that is not here.
    """
    why = why_missing(spec.target)
    if why:
        yield why
    for field in ("probe", "incompatible_because", "local_world_size"):
        if missing := why_missing(getattr(spec, field, None), what=field):
            yield missing
    if isinstance(spec, PrecisionSpec):
        yield from _unknown(spec.accelerators or (), "accelerator", registry)
    if isinstance(spec, LauncherSpec):
        yield from _unknown((spec.cluster_environment,), "cluster_environment", registry)
    if not isinstance(spec, StrategySpec):
        return
    can = spec.capabilities
    yield from _unknown(can.launchers or (), "launcher", registry)
    yield from _unknown((can.checkpoint_io,), "checkpoint_io", registry)
    yield from _unknown(can.accelerators or (), "accelerator", registry)
    own = {name.casefold() for name in can.engine_precisions}
    wanted = [name for name in can.precisions or () if name.casefold() not in own]
    yield from _unknown(wanted, "precision", registry)
    taken = {name.casefold() for name in can.precisions or own}
    if left_out := sorted(own - taken):
        yield (
            f"it names the engine's precision(s) {', '.join(left_out)}, and not in precisions, so "
            "that nobody can choose them: name them there too"
        )
    if strange := [name for name in can.compiles if name not in _COMPILES]:
        yield (
            f"it names {', '.join(map(repr, strange))} in compiles; expected some of "
            + ", ".join(map(repr, _COMPILES))
        )
    for kind in ("launcher", "checkpoint_io"):
        if isinstance(name := spec.init_args.get(kind), str) and name not in (
            *(can.launchers or ()),
            can.checkpoint_io,
        ):
            yield from _unknown((name,), kind, registry)
    if not why:
        yield from check_source(spec, registry)


def _unknown(names: Iterable[str], kind: str, registry: Registry) -> Iterator[str]:
    """Yield which names mean nothing here, unless a distribution that is known provides them."""
    for name in dict.fromkeys(names):
        try:
            meant = registry.find(kind, name).spec.name
            if kind == "precision" and meant != name:
                yield (
                    f"it names the precision {name!r}, which a plan calls otherwise: write "
                    f"{meant!r}"
                )
        except ConfigurationError as error:
            if not installation_hint(name):
                what = kind.replace("_", " ")
                article = "an" if what[0] in "aeiou" else "a"
                yield f"it names {article} {what} that cannot be found: {error}"


def why_missing(target: object, *, what: str = "target") -> str:
    """Return why a target `"package.module:Class"` is not there, as far as its source shows.

    "": it is there, or only an import would show.

    Args:
        target: what a spec has; what is no string is there.
        what: which field of the spec it is.

    Example:
        >>> from stratagem_testing.author.spec_checks import why_missing
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
