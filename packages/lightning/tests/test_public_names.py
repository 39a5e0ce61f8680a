"""This distribution uses public names of core only: those in the `dir()` of a public module."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratagem
from stratagem_lightning.layout import LAYOUT

SOURCES = sorted(Path(__file__).parents[1].glob("src/**/*.py"))
ROOMS = {path.stem for path in Path(stratagem.__file__).parent.iterdir()}


def used_names(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module of core, name) for each name of core that a file imports or reads."""
    tree = ast.parse(file.read_text())
    rooms: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.partition(".")[0] != "stratagem":
            continue
        for alias in node.names:
            if node.module == "stratagem" and alias.name in ROOMS - {"__init__"}:
                rooms[alias.asname or alias.name] = f"stratagem.{alias.name}"
            else:
                yield node.module, alias.name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=held), attr=name) if held in rooms:
                yield rooms[held], name


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_a_file_uses_public_names_of_core(file: Path) -> None:
    for module, name in used_names(file):
        assert module.count(".") < 2, f"{module} is private"
        assert name in dir(importlib.import_module(module)), f"{module}.{name} is private"


# Of backends, which may not be installed.
NOT_HERE = ("Bitsandbytes", "DeepSpeed", "SingleXLA", "TransformerEngine", "XLA")


def test_the_layout_serves_public_names_of_core() -> None:
    places = {place for names in LAYOUT.values() for place in names.values()}
    for module, _, name in (place.partition(":") for place in sorted(places)):
        if module.startswith("stratagem."):
            assert module.count(".") < 2, f"{module} is private"
            if not name.startswith(NOT_HERE):
                assert name in dir(importlib.import_module(module)), f"{module}.{name} is private"
