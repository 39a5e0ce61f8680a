"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from docstring_examples import failures_of, modules_of, public_names, why_no_example

PUBLIC = public_names(("stratagem_mesh",), "stratagem_mesh")


@pytest.mark.parametrize("name", list(modules_of("stratagem_mesh")))
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_of(name) == 0


def test_the_public_names_are_found() -> None:
    assert "stratagem_mesh.MeshStrategy" in PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example_that_can_fail(name: str) -> None:
    assert why_no_example(PUBLIC[name]) == ""
