"""Guests and example plugins import only what the public modules of core list."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem_testing.author.private_imports import private_imports_of, public_modules

ROOT = Path(__file__).resolve().parents[1]
GUESTS = sorted(
    path
    for pattern in ("packages/*/src/*", "examples/plugins/*/src/*", "tests/third_party/*/src/*")
    for path in ROOT.glob(pattern)
    if path.is_dir() and path.name != "stratagem"
)


@pytest.mark.parametrize("package", GUESTS, ids=lambda path: path.name)
def test_a_guest_imports_public_names_only(package: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in sorted(package.rglob("*.py"))
        for sentence in private_imports_of(path)
    ]
    assert found == []


def test_the_public_modules_are_the_rooms_that_list_names() -> None:
    assert {"stratagem", "stratagem.strategies", "stratagem.errors"} <= set(public_modules())
    assert not {"stratagem.one_device", "stratagem.interfaces"} & set(public_modules())
    assert all(module.count(".") <= 1 for module in public_modules())
