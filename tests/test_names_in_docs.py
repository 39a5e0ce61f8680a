"""Names that the pages of docs mention are names of objects and modules."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stratagem import Lite, Trainer
from stratagem.discovery import former

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    # The names of Lightning's Trainer have a test of their own, in packages/lightning.
    if not {"generated", "_build", "private-names.md"} & set(path.parts)
]
TRAINER = Trainer(accelerator="cpu", devices=1, logger=False)
OBJECTS: dict[str, Any] = {
    "trainer": TRAINER,
    "lite": Lite(accelerator="cpu", devices=1),
    "strategy": TRAINER.strategy,
}


def has(owner: Any, name: str) -> bool:
    """Return whether an object has an attribute, without the value of a property."""
    return bool(vars(owner).get(name) or inspect.getattr_static(owner, name, None) is not None)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: path.stem)
def test_an_attribute_that_a_page_names_exists(page: Path) -> None:
    found = re.findall(
        r"`(?:self\.)?([Tt]rainer|[Ll]ite|[Ss]trategy)\.([a-z]\w*)", page.read_text()
    )
    absent = {
        f"{kind}.{name}"
        for kind, name in found
        if not has(OBJECTS[kind.lower()], name)
        and name not in former.former_names(type(OBJECTS[kind.lower()]))
    }
    assert absent == set()


def test_table_of_changed_imports_lists_importable_names() -> None:
    text = (ROOT / "docs/start/from-lightning.md").read_text()
    rows = re.findall(r"^\|(.+)\|(.+)\|$", text.partition("## 2.")[2].partition("## 3.")[0], re.M)
    names = [name for _, right in rows for name in re.findall(r"`(stratagem[\w.]*)`", right)]
    assert len(names) >= 10
    for name in names:
        module, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ImportError:
            assert hasattr(import_module(module), last), name
    for name in ("Trainer", "Callback", "seed_everything"):
        assert hasattr(import_module("stratagem"), name)
