"""Core keeps the shape that ARCHITECTURE.md draws; docstrings, comments and tests use nouns.

Each limit here may only fall.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/src"))

MOST_LINES = 20_794
MOST_FILES = 13
MOST_FILLER = 0.06
MOST_FILLER_OF_ARGS = 0.02
MOST_FILLER_OF_COMMENTS = 0.01
MOST_FILLER_OF_TEST_NAMES = 0.01
MOST_FILES_OF_CORE = 175
MOST_BROUGHT_ALONG = {"import of Lite": 8_766, "fit of a Trainer": 18_800}


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


def test_docstrings_with_args_use_nouns() -> None:
    docstrings = structure.measure_args(ROOT)
    assert docstrings.count > 1000
    assert docstrings.share <= MOST_FILLER_OF_ARGS, "\n\n".join(docstrings.filler)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("path: what is saved.", 1.0),
        ("path: the folder of the checkpoint.", 0.0),
        ("path: the folder.\n\n    Those that exist are kept.", 1.0),
        ("mode: `none` or `there is`.", 0.0),
        ("what: the name.\n\n    Example:\n        >>> [one for who in names]", 0.0),
    ],
)
@pytest.mark.parametrize("name", ["save", "_save"])
def test_filler_in_the_args_of_a_docstring_exceeds_the_limit(
    text: str, share: float, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "packages" / "one" / "src" / "module.py"
    path.parent.mkdir(parents=True)
    docstring = f"Save a checkpoint.\n\n    Args:\n        {text}\n    "
    path.write_text(f'def {name}(path):\n    """{docstring}"""\n\ndef what():\n    """What."""\n')
    texts = structure.measure_args(tmp_path)
    assert (texts.count, texts.share) == (1, share)
    assert (texts.share > MOST_FILLER_OF_ARGS) is bool(share)


def test_comments_use_nouns() -> None:
    comments = structure.measure_comments(ROOT)
    assert comments.count > 1000
    assert comments.share <= MOST_FILLER_OF_COMMENTS, "\n".join(comments.filler)


def test_names_of_tests_use_nouns() -> None:
    """Names say subject, verb and object; `none` counts, though the value None is fine."""
    names = structure.measure_test_names(ROOT)
    assert names.count > 2000
    assert names.share <= MOST_FILLER_OF_TEST_NAMES, "\n".join(names.filler)


@pytest.mark.parametrize(
    ("comment", "name", "counts"),
    [
        ("# What is saved", "test_what_is_saved", True),
        ("# there are none", "test_a_name_of_none", True),
        ("# None is the default", "test_nonempty_whole_whatever", False),
        ("# nothing of its own", "test_something_of_its_own", False),
    ],
)
def test_filler_words_are_matched_as_whole_words(
    comment: str, name: str, counts: bool, tmp_path: Path
) -> None:
    for folder, text in (("src", comment), ("tests", f"def {name}(): ...")):
        path = tmp_path / "packages" / "one" / folder / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    for texts in (structure.measure_comments(tmp_path), structure.measure_test_names(tmp_path)):
        assert (texts.count, len(texts.filler)) == (1, counts)
        assert texts.share == counts
