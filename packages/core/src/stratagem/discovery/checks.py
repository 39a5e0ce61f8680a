"""What a spec promises that is not there: found without importing what it describes."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator

from stratagem.discovery.registry import Registry
from stratagem.discovery.specs import ComponentSpec, StrategySpec
from stratagem.errors import ConfigurationError


def check_spec(spec: ComponentSpec, registry: Registry) -> Iterator[str]:
    """Yield what is wrong with a spec: its target, the launchers and formats that it names.

    A target's module is found and parsed, and not executed: it may need an SDK that is not here.
    """
    for target in (spec.target, getattr(spec, "objection", None)):
        if why := why_missing(target):
            yield why
    if not isinstance(spec, StrategySpec):
        return
    named = [("launcher", name) for name in spec.capabilities.launchers or ()]
    named.append(("checkpoint_io", spec.capabilities.checkpoint_io))
    named += [
        (kind, name)
        for kind in ("launcher", "checkpoint_io")
        if isinstance(name := spec.init_args.get(kind), str)
    ]
    for kind, name in dict.fromkeys(named):
        try:
            registry.find(kind, name)
        except ConfigurationError as error:
            yield f"it names a {kind.replace('_', ' ')} that cannot be found: {error}"


def why_missing(target: object) -> str:
    """Return why a target `"package.module:Class"` is not there, as far as its source shows.

    "": it is there, or only an import would show.

    Example:
        >>> from stratagem.discovery.checks import why_missing
        >>> why_missing("stratagem.native.strategies.ddp:DPDStrategy")
        "its target's module stratagem.native.strategies.ddp defines no 'DPDStrategy'"
    """
    if not isinstance(target, str):
        return ""
    module, _, attribute = target.partition(":")
    try:
        found = importlib.util.find_spec(module)
    # A package above it may raise whatever a vendor's SDK raises.
    except (Exception, SystemExit) as error:
        return f"its target {target!r} cannot be found: {type(error).__name__}: {error}"
    if found is None:
        return f"its target {target!r} cannot be found: there is no module {module}"
    if found.origin is None or not found.origin.endswith(".py"):
        return ""
    name = attribute.partition(".")[0]
    try:
        with open(found.origin, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            source = file.read()
        # Where it mostly is; parsing a module takes longer than the rest of doctor together.
        if re.search(rf"^(class|def) {re.escape(name)}\b".encode(), source, re.MULTILINE):
            return ""
        names = set(_defined(ast.parse(source)))
    except (OSError, SyntaxError, ValueError) as error:
        return f"its target's module {module} cannot be read: {type(error).__name__}: {error}"
    # What these define, only an import would show.
    if {"*", "__getattr__", name} & names:
        return ""
    return f"its target's module {module} defines no {name!r}"


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
