"""Names that an object does not have: the error names what to use instead.

`absent_names.txt` lists names of Lightning and former names of Stratagem. Other names are compared
with those of the object.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from stratagem.discovery.entry_points import read_text


@functools.cache
def remedies() -> Mapping[str, str]:
    """Return what to use instead of each absent name, by `CLASS.NAME`, as a sentence.

    `CLASS.NAME=` stands for an assignment, and `CLASS(NAME)` for an argument.
    """
    path = f"{os.path.dirname(__file__)}/absent_names.txt"  # noqa: PTH120 - pathlib is slow to import
    lines = read_text(path).splitlines()
    return dict(line.split(": ", 1) for line in lines)


def remedy_for(kind: type, name: str, form: str = "{}.{}") -> str:
    """Return the replacement of a name that does not exist, or "" for an unknown name.

    Args:
        kind: the class; the names of its bases count too.
        name: the attribute or argument.
        form: "{}.{}=" for an assignment, "{}({})" for an argument.

    Example:
        >>> from stratagem import Trainer
        >>> remedy_for(Trainer, "lightning_module")
        'Use trainer.model'
    """
    known = remedies()
    keys = (form.format(base.__name__, name) for base in kind.__mro__)
    return next((known[key] for key in keys if key in known), "")


class MissingAttribute(AttributeError):
    """An attribute that an object does not have.

    The message is made when it is read: most of these errors are answers to `hasattr`.
    """

    def __str__(self) -> str:
        """Return the message with what to use instead, or the nearest name."""
        owner = vars(self).get("owner")
        advice = "" if owner is None else advice_for(owner, str(self.name))
        return f"{self.args[0]}. {advice}" if advice else str(self.args[0])

    def __reduce__(self) -> Any:
        # The owner stays in its process.
        return AttributeError, (str(self),)


def advice_for(owner: object, name: str) -> str:
    """Return what to use instead of an attribute, the nearest name, or ""."""
    if advice := remedy_for(type(owner), name):
        return advice
    from stratagem.discovery.registry import nearest_of  # after failures only

    public = [known for known in dir(owner) if not known.startswith("_")]
    near = "" if name.startswith("_") else nearest_of(name, public)
    return f"Did you mean {near!r}?" if near else ""


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that neither an object nor its class has."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    # With an `obj`, Python would add a suggestion of its own.
    error = MissingAttribute(message, name=name, obj=None)
    vars(error)["owner"] = owner
    return error


def explain_missing(error: AttributeError, owner: object) -> None:
    """Add what to use instead to an AttributeError of an object whose class says nothing of it."""
    if type(error) is AttributeError and error.obj is owner:
        advice = advice_for(owner, str(error.name))
        error.args = (f"{error}. {advice}" if advice else str(error),)


def find_or_explain(owner: object, name: str) -> Any:
    """Raise the error for a missing attribute; for `__getattr__`, which gets property errors too.

    Raises:
        AttributeError: the property's own error, or an error that names the replacement.
    """
    if any(name in vars(base) for base in type(owner).__mro__):
        return object.__getattribute__(owner, name)
    raise missing_attribute(owner, name)


def check_assignment(owner: object, name: str, arguments: Mapping[str, str]) -> None:
    """Check that a user may set a public attribute.

    Args:
        owner: the object.
        name: the attribute.
        arguments: how to set an option, by the name of its attribute.

    Raises:
        AttributeError: the attribute is read-only, has another name, or is misspelled.
    """
    kind = type(owner)
    own = getattr(kind, name, None)
    advice = remedy_for(kind, name, "{}.{}=")
    if isinstance(own, property) and own.fset is None:
        problem, advice = "is read-only", advice or arguments.get(name, "A run sets it")
    elif own is None and name not in vars(owner) and not _is_declared(kind, name):
        problem, advice = "does not exist", advice or remedy_for(kind, name) or _near(owner, name)
    else:
        return
    if advice:
        raise AttributeError(f"{kind.__name__}.{name} {problem}. {advice}", name=name, obj=None)


def _is_declared(kind: type, name: str) -> bool:
    return any(name in vars(base).get("__annotations__", ()) for base in kind.__mro__)


def _near(owner: object, name: str) -> str:
    """Return a question with the public name that differs in a letter or two, or ""."""
    from stratagem.discovery.registry import nearest_of  # after failures only

    near = nearest_of(name, dir(owner), cutoff=0.9)
    return f"Did you mean {near!r}?" if near and name[-1].isalpha() else ""
