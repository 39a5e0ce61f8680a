"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from docstring_examples import failures_of, modules_of, public_names, why_no_example

ROOMS = ("stratagem.callbacks", "stratagem.loggers", "stratagem.profilers")
OWN_ROOMS = (
    "stratagem_extras.language",
    "stratagem_extras.parameter_groups",
    "stratagem_extras.tuner",
)
PUBLIC = public_names((*ROOMS, *OWN_ROOMS), "stratagem_extras")
NEEDS_JSONARGPARSE = () if find_spec("jsonargparse") else ("stratagem_extras.cli",)


@pytest.mark.parametrize("name", list(modules_of("stratagem_extras", NEEDS_JSONARGPARSE)))
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_of(name) == 0


def test_the_public_names_are_found() -> None:
    assert {"stratagem_extras.tuner.Tuner", "stratagem.callbacks.Timer"} <= set(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example_that_can_fail(name: str) -> None:
    assert why_no_example(PUBLIC[name]) == ""
