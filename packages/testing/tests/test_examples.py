"""The examples in docstrings run."""

from __future__ import annotations

from pathlib import Path

import pytest
from docstring_examples import failures_of, modules_of


@pytest.mark.parametrize("name", list(modules_of("stratagem_testing")))
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_of(name) == 0
