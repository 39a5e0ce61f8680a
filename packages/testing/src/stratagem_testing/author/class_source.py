"""What a strategy's class says in its source, compared with its spec; nothing is imported."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from stratagem.discovery import (
    FIRST,
    OWN_BACKWARD,
    OWN_CLIPPING,
    OWN_FOLLOWING,
    OWN_STEP,
    Capabilities,
    Registry,
    StrategySpec,
    contradictions,
    difference,
    find_module,
    one_process_of,
)
from stratagem.errors import PluginError

_FROM_IMPORT = re.compile(r"^from [\w.]+ import (?:\([^)]*\)|[^(\n]+)$", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\b.*?(?=^[^\s#)]|\Z)", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"class \w+\s*(?:\([^()]*\))?\s*:")
_FUNCTION = re.compile(r"^([ \t]+)(?:async )?def (\w+)", re.MULTILINE)
_CAPABILITIES = re.compile(r"^([ \t]+)capabilities\b.*?(?=^\1[^\s)]|\Z)", re.MULTILINE | re.DOTALL)

_OF_BASES = ("stratagem.strategies", "stratagem_torch.parallel", "stratagem_torch.sharding")
_BASES = {"Strategy": True, "ParallelStrategy": False, "SingleDeviceStrategy": True}
"""Bases that leave every part of a step as it is, and whether they are one process."""


def check_source(spec: StrategySpec, registry: Registry) -> Iterator[str]:
    """Yield the contradictions between a strategy's class and its spec, as far as its source shows.

    Args:
        spec: the spec; the module of its target exists.
        registry: the registry that resolves base classes of core.
    """
    source = _source_of(spec.target) if isinstance(spec.target, str) else None
    if source is None:
        return
    own, bases = source.capabilities, source.bases
    if source.assigns_capabilities:
        if own is not None and (text := difference(source.name, spec.capabilities, own)):
            yield text
    elif len(bases) == 1 and all(bases):
        inherited = _capabilities_of_core(bases[0], registry)
        is_known = inherited is not None or bases[0] in ("Strategy", "ParallelStrategy")
        if is_known and (text := difference(source.name, spec.capabilities, inherited)):
            yield text
    can = spec.capabilities
    if bases and all(_leaves_steps(base, registry) for base in bases):
        yield from contradictions(
            source.name,
            can,
            clips=not source.methods.isdisjoint(OWN_CLIPPING),
            steps=not source.methods.isdisjoint(OWN_STEP),
            runs_backward=not source.methods.isdisjoint(OWN_BACKWARD),
            follows=not source.methods.isdisjoint(OWN_FOLLOWING)
            or any(_follows(base, registry) for base in bases),
        )
    drives_one = [_BASES.get(base, True) for base in bases]
    if drives_one and not any(drives_one) and can.one_process and can.many_devices:
        yield one_process_of(source.name)


def _follows(base: str, registry: Registry) -> bool:
    """Whether ranks follow the evaluation steps of other ranks by methods of a base class."""
    can = _capabilities_of_core(base, registry)
    return can is not None and can.follows_evaluation


def _leaves_steps(base: str, registry: Registry) -> bool:
    """Whether a base class is one that neither clips nor runs backward in place of the user."""
    can = Capabilities() if base in _BASES else _capabilities_of_core(base, registry)
    return can is not None and can.manual_backward and not (can.engine_clips or can.engine_steps)


def _capabilities_of_core(class_name: str, registry: Registry) -> Capabilities | None:
    for candidate in registry.candidates("strategy"):
        spec = candidate.spec
        if (
            candidate.distribution in FIRST
            and spec.class_name == class_name
            and isinstance(spec, StrategySpec)
        ):
            return spec.capabilities
    return None


@dataclass(frozen=True)
class _Source:
    """A class in the text of its module.

    Attributes:
        name: the name of the class.
        module: the text of its module.
        text: the text of the class.
        tree: the class without its body.
        methods: the names of the functions in its body.
    """

    name: str
    module: str
    text: str
    tree: ast.ClassDef
    methods: frozenset[str]

    def imported(self, expression: ast.expr) -> tuple[str, str]:
        """Return the (module, name) that a `from` import binds to a name; ("", ""): it does not."""
        if not isinstance(expression, ast.Name):
            return "", ""
        for line in _FROM_IMPORT.findall(self.module):
            # Only lines that contain the name: parsing every import takes as long as parsing the
            # class.
            for node in ast.parse(line).body if expression.id in line else ():
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if expression.id == (alias.asname or alias.name):
                            return node.module or "", alias.name
        return "", ""

    @cached_property
    def bases(self) -> list[str]:
        """The names of the base classes that are ours; "" for other base classes."""
        return [
            name if module in _OF_BASES else ""
            for module, name in map(self.imported, self.tree.bases)
        ]

    @cached_property
    def _assigned(self) -> ast.expr | None:
        found = _CAPABILITIES.search(self.text)
        if found is None:
            return None
        try:
            (node,) = ast.parse(found[0].strip()).body
        except (SyntaxError, ValueError):
            return None
        return node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None

    @property
    def assigns_capabilities(self) -> bool:
        """Whether the class body assigns capabilities."""
        return _CAPABILITIES.search(self.text) is not None or "capabilities" in self.methods

    @cached_property
    def capabilities(self) -> Capabilities | None:
        """The capabilities that the class body assigns.

        None: only an import would show them.
        """
        value = self._assigned
        if isinstance(value, ast.Name):
            module, name = self.imported(value)
            # The plugin module, which is imported already, mostly has them.
            found = getattr(sys.modules.get(module), name, None) if module else None
            return found if isinstance(found, Capabilities) else None
        if isinstance(value, ast.Call) and not value.args:
            make, function = Capabilities, value.func
            if isinstance(function, ast.Attribute) and function.attr == "parallel":
                make, function = Capabilities.parallel, function.value  # type: ignore[assignment]
            if self.imported(function)[1] != "Capabilities":
                return None
            try:
                arguments = {str(k.arg): ast.literal_eval(k.value) for k in value.keywords}
                return make(**arguments)
            except (ValueError, TypeError, PluginError):
                return None
        return None


def _source_of(target: str) -> _Source | None:
    """Return the class that a target names, where it lies in a file of its own module."""
    module, _, name = target.partition(":")
    place = find_module(module)
    if isinstance(place, str) or not (place.origin or "").endswith(".py"):
        return None
    path = str(place.origin)
    changed = os.stat(path).st_mtime_ns  # noqa: PTH116 - pathlib is slow to import
    return _class_in(path, changed, name)


@lru_cache(maxsize=64)
def _class_in(path: str, changed: int, name: str) -> _Source | None:
    """Return a class of a file that was `changed` at that time; several specs share one."""
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow to import
        text = file.read()
    # Parse the requested class only: all classes take a fifth of doctor's time. The patterns are
    # constant, since compiling them for each name is slow too.
    found = next((match for match in _CLASS.finditer(text) if match[1] == name), None)
    head = None if found is None else _HEAD.match(found[0])
    if found is None or head is None:
        return None
    try:
        (tree,) = ast.parse(f"{head[0]} pass").body
    except (SyntaxError, ValueError):
        return None
    functions = _FUNCTION.findall(found[0])
    outer = min((indentation for indentation, _ in functions), default="")
    methods = frozenset(function for indentation, function in functions if indentation == outer)
    return _Source(name, text, found[0], tree, methods) if isinstance(tree, ast.ClassDef) else None
