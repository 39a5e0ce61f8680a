"""The house stays as ARCHITECTURE.md draws it: few rooms, no circles, nothing too long."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path.parent
    for folder in ("packages", "examples/plugins")
    for path in ROOT.glob(f"{folder}/*/src/*/__init__.py")
)

STILL_TOO_LONG: dict[str, str] = {}
"""Place (file, or file and name) -> why it is over the limit all the same."""


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


@pytest.mark.parametrize("package", SOURCES, ids=lambda path: path.name)
def test_no_file_class_or_function_is_too_long(package: Path) -> None:
    too_long = {
        f"{place.partition(':')[0]} {place.partition(' ')[2]}".strip()
        for _, _, place in structure.measure(package).too_long
    }
    assert too_long - STILL_TOO_LONG.keys() == set()
