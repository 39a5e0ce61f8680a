"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from docstring_examples import failures_of, modules_of, public_names, why_no_example

import stratagem

ROOMS = (
    "stratagem.accelerators",
    "stratagem.callbacks",
    "stratagem.checkpoint",
    "stratagem.environments",
    "stratagem.loggers",
    "stratagem.precision",
    "stratagem.profilers",
    "stratagem.strategies",
)
PUBLIC = {
    **{f"stratagem.{name}": getattr(stratagem, name) for name in stratagem.__all__},
    **public_names(ROOMS, "stratagem"),
}
del PUBLIC["stratagem.__version__"]


@pytest.mark.parametrize("name", list(modules_of("stratagem")))
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_of(name) == 0


def test_the_public_names_are_found() -> None:
    assert {"stratagem.Trainer", "stratagem.strategies.SingleDeviceStrategy"} <= set(PUBLIC)
    assert len(PUBLIC) > 20


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example_that_can_fail(name: str) -> None:
    assert why_no_example(PUBLIC[name]) == ""
