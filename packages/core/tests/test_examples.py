"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

import stratagem


def modules_in(path: Iterable[str], package: str) -> Iterator[str]:
    for found in pkgutil.iter_modules(path, f"{package}."):
        # Importing the one runs the program; the other changes what `import lightning` means, and
        # has its examples run in a process of its own (packages/lightning/tests).
        if found.name.endswith("__main__") or found.name == "stratagem_lightning":
            continue
        # It needs jsonargparse, of the extra [cli].
        if found.name == "stratagem_extras.cli" and find_spec("jsonargparse") is None:
            continue
        yield found.name
        if found.ispkg:
            yield from modules_in(importlib.import_module(found.name).__path__, found.name)


MODULES = ["stratagem", *modules_in(stratagem.__path__, "stratagem")]

# The folders of users' import names.
HOUSES = (
    "accelerators",
    "callbacks",
    "checkpoint",
    "environments",
    "loggers",
    "precision",
    "profilers",
    "strategies",
    "tuner",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def public_names() -> dict[str, Any]:
    named = {
        f"stratagem.{name}": getattr(stratagem, name)
        for name in stratagem.__all__
        if not name.startswith("__")
    }
    for house in HOUSES:
        module: ModuleType = importlib.import_module(f"stratagem.{house}")
        # Some are imported when they are used.
        for name in {*dir(module), *getattr(module, "__all__", ())}:
            thing = getattr(module, name)
            public = inspect.isclass(thing) or inspect.isfunction(thing)
            # A backend that is installed documents its own.
            if public and name[0] != "_" and thing.__module__.startswith("stratagem."):
                named[f"stratagem.{house}.{name}"] = thing
    return named


PUBLIC = public_names()


def test_the_public_names_are_found() -> None:
    assert {"stratagem.Trainer", "stratagem.strategies.DDPStrategy"} <= set(PUBLIC)
    assert len(PUBLIC) > 20


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_an_example_that_can_fail(name: str) -> None:
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    if not inspect.isclass(PUBLIC[name]) and not inspect.isfunction(PUBLIC[name]):
        # An object, such as the registry, is documented by its class.
        docstring = inspect.getdoc(type(PUBLIC[name])) or ""
    examples = doctest.DocTestParser().get_examples(docstring)
    assert examples, f"the docstring of {name} has no example (lines that begin with >>>)"
    assert any(example.want for example in examples), f"no example of {name} shows a result"
