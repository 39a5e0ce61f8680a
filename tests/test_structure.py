"""Core keeps the shape that ARCHITECTURE.md draws; docstrings of all packages use nouns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/src"))

MOST_LINES = 20_325
MOST_FILES = 13
MOST_FILLER = 0.08
MOST_FILES_OF_CORE = 172
MOST_BROUGHT_ALONG = {"import of Lite": 8_600, "fit of a Trainer": 18_800}


def load_structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "benchmarks/structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module
    spec.loader.exec_module(module)
    return module


structure = load_structure()


def test_core_has_few_rooms_and_no_circles() -> None:
    shape = structure.measure(structure.CORE)
    assert len(shape.files) <= 10
    assert len(shape.folders) <= 19
    assert shape.circles == []
    assert shape.floors <= 10


def test_core_has_few_lines_of_code() -> None:
    assert structure.measure(structure.CORE).lines <= MOST_LINES


def test_core_has_few_files() -> None:
    assert len(list(structure.CORE.rglob("*.py"))) <= MOST_FILES_OF_CORE


@pytest.mark.parametrize("run", structure.RUNS)
def test_a_run_imports_little_of_core(run: str) -> None:
    assert structure.lines_brought_along(structure.RUNS[run]) <= MOST_BROUGHT_ALONG[run]


def test_a_folder_has_few_files() -> None:
    flat = structure.measure(structure.CORE).flat
    assert {folder: n for folder, n in flat.items() if n > MOST_FILES} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_docstrings_use_nouns(package: Path) -> None:
    roots = [path for path in (package / "src").iterdir() if (path / "__init__.py").exists()]
    shapes = [structure.measure(root) for root in roots]
    docstrings = sum(shape.docstrings for shape in shapes)
    assert docstrings > 0
    assert sum(shape.filler for shape in shapes) <= MOST_FILLER * docstrings
