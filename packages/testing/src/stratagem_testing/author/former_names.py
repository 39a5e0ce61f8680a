"""Former names of the plugin API in a plugin's sources; nothing of the plugin is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stratagem.discovery import FORMER, Change, changes_of, what_became
from stratagem_testing.author.private_imports import sources_of

_BASES: Mapping[str, tuple[str, ...]] = {
    "stratagem.strategies": ("Strategy", "ParallelStrategy"),
    "stratagem.accelerators": ("Accelerator",),
    "stratagem.checkpoint": ("CheckpointIO",),
    "stratagem.callbacks": ("Callback",),
    "stratagem": ("Callback",),
    "stratagem_testing": ("StrategyConformance",),
}
"""The interfaces of the classes that a module of core has."""
_RANKS = ("Ranks", "ProcessGroupRanks")
_HELD_AS: Mapping[str, tuple[str, ...]] = {
    "accelerator": ("Accelerator",),
    "capabilities": ("Capabilities",),
    "checkpoint_io": ("CheckpointIO",),
    "plan": ("RunPlan",),
    "ranks": ("Ranks",),
    "strategy": ("Strategy", "ParallelStrategy"),
}
"""The classes of an object, by the name under which authors have it: `self.ranks`, `plan`."""


def former_names_in(named: Iterable[str]) -> list[str]:
    """Return a sentence for each place in a distribution's sources that has a former name.

    Args:
        named: modules, or places in them ("package.module:name"), of one distribution; all of a
            package is looked at.
    """
    trees = {path: tree for path in sources_of(named) if (tree := _parsed(path)) is not None}
    interfaces = _interfaces_of(trees.values())
    return [
        what_became(f"{path.name}, line {line}: {place}", change)
        for path, tree in trees.items()
        for line, place, change in sorted(
            {*_overrides(tree, interfaces), *_uses(tree), *_arguments(tree)}
        )
    ]


def _parsed(path: Path) -> ast.AST | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _interfaces_of(trees: Iterable[ast.AST]) -> dict[str, tuple[str, ...]]:
    """Return the interfaces of each class in some modules, by its name."""
    classes: dict[str, list[str]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = [_last_name(base) for base in node.bases]
            elif isinstance(node, ast.ImportFrom) and (node.module or "") in _BASES:
                for alias in node.names:
                    is_ranks = alias.name in _RANKS
                    kinds = ("Ranks",) if is_ranks else _BASES[node.module or ""]
                    found[alias.asname or alias.name] = kinds
    for _ in classes:  # a class may be defined before its base is known
        for name, bases in classes.items():
            inherited = [kind for base in bases for kind in found.get(base, ())]
            if inherited:
                found[name] = tuple(dict.fromkeys(inherited))
    return found


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _overrides(
    tree: ast.AST, interfaces: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[int, str, Change]]:
    """Yield the members of classes that have a former name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        changes = changes_of(interfaces.get(node.name, ()))
        for member in node.body:
            names = [getattr(member, "name", "")]
            if isinstance(member, (ast.Assign, ast.AnnAssign)) and _is_flag(member.value):
                targets = member.targets if isinstance(member, ast.Assign) else [member.target]
                names = [_last_name(target) for target in targets]
            for name in names:
                if name in changes:
                    yield member.lineno, f"{node.name}.{name}", changes[name]


def _is_flag(value: ast.expr | None) -> bool:
    """Whether a value may be of the API: containers are the author's own."""
    return isinstance(value, ast.Constant) and isinstance(value.value, (bool, int))


def _uses(tree: ast.AST) -> Iterator[tuple[int, str, Change]]:
    """Yield the uses of former attributes of objects that authors receive."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            held = _last_name(node.value)
            changes = changes_of(_HELD_AS.get(held, ()))
            if node.attr in changes:
                yield node.lineno, f"{held}.{node.attr}", changes[node.attr]


def _arguments(tree: ast.AST) -> Iterator[tuple[int, str, Change]]:
    """Yield the former arguments in calls of classes of the plugin API."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        kind = _last_name(node.func)
        if kind == "parallel" and isinstance(node.func, ast.Attribute):
            kind = _last_name(node.func.value)
        changes = FORMER.get("Ranks" if kind in _RANKS else kind, {})
        for keyword in node.keywords:
            name = keyword.arg or ""
            if name in changes:
                yield node.lineno, f"{kind}({name}=...)", changes[name]
