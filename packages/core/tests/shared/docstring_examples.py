"""The examples in docstrings: the modules of a package, and the public names of a module."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any


def modules_of(package: str, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a package's name and those of all its modules, but for programs and `leave_out`."""
    yield package
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        # Importing __main__ runs the program.
        if found.name.endswith("__main__") or found.name in leave_out:
            continue
        if found.ispkg:
            yield from modules_of(found.name, leave_out)
        else:
            yield found.name


def failures_of(module: str) -> int:
    """Run the examples of a module; return how many fail."""
    return doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS).failed


def public_names(rooms: tuple[str, ...], package: str) -> dict[str, Any]:
    """Return the classes and functions that modules serve and a package defines, by their path."""
    named = {}
    for room in rooms:
        module = importlib.import_module(room)
        # Some are imported when they are used.
        for name in {*dir(module), *getattr(module, "__all__", ())}:
            thing = getattr(module, name)
            public = inspect.isclass(thing) or inspect.isfunction(thing)
            if public and name[0] != "_" and thing.__module__.partition(".")[0] == package:
                named[f"{room}.{name}"] = thing
    return named


def why_no_example(thing: Any) -> str:
    """Return why the docstring of a class, function or object shows nothing, or ""."""
    if not inspect.isclass(thing) and not inspect.isfunction(thing):
        thing = type(thing)  # an object, such as the registry, is documented by its class
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
    if not examples:
        return "its docstring has no example (lines that begin with >>>)"
    return "" if any(example.want for example in examples) else "no example shows a result"
