"""Arguments that environment variables give, for classes of libraries."""

from __future__ import annotations

import functools
import inspect
import os
from argparse import Namespace
from ast import literal_eval
from collections.abc import Callable
from typing import Any


def parse_env_variables(cls: type, template: str = "PL_%(cls_name)s_%(cls_argument)s") -> Namespace:
    """Return the arguments of a class that environment variables give, as Python reads them.

    Args:
        cls: the class.
        template: the names of the variables.

    Example:
        >>> parse_env_variables(dict)
        Namespace()
    """
    found: dict[str, Any] = {}
    try:
        arguments = list(inspect.signature(cls).parameters)
    except ValueError:
        arguments = []
    for argument in arguments:
        name = template % {"cls_name": cls.__name__.upper(), "cls_argument": argument.upper()}
        if text := os.environ.get(name):
            found[argument] = _read(text)
    return Namespace(**found)


def _read(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def defaults_from_env_vars(init: Callable[..., None]) -> Callable[..., None]:
    """Let an `__init__` take what was not passed from environment variables."""

    @functools.wraps(init)
    def with_defaults(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(list(inspect.signature(type(self)).parameters), args, strict=False))
        of_environment = vars(parse_env_variables(type(self)))
        init(self, **{**of_environment, **named, **kwargs})

    return with_defaults
