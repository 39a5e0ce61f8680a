"""Checks of a strategy's class and arguments: an author's mistake is named where it is made."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.errors import ConfigurationError


@cache
def check_overrides(kind: type, base: type) -> None:
    """Refuse a class whose methods do not take what those of `base` take; once for each class.

    Raises:
        ConfigurationError: names the method, and shows both signatures.
    """
    for name, expected, own in _overridden(kind, base):
        if not callable(own):
            raise ConfigurationError(
                f"{kind.__name__}.{name} is a {type(own).__name__}; expected a method, "
                f"{name}{inspect.signature(expected)}"
            )
        arguments, keywords = _as_called(expected)
        try:
            inspect.signature(own).bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind.__name__}.{name}{inspect.signature(own)} cannot be called as "
                f"{base.__name__}.{name}{inspect.signature(expected)} is ({error}): give it the "
                "same parameters"
            ) from None


def _overridden(kind: type, base: type) -> Iterator[tuple[str, FunctionType, Any]]:
    for name in dir(base):
        expected = inspect.getattr_static(base, name)
        if name.startswith("_") or not isinstance(expected, FunctionType):
            continue
        own = getattr(kind, name)
        if own is not expected:
            yield name, expected, own


def _as_called(expected: FunctionType) -> tuple[list[None], dict[str, None]]:
    """Return arguments as the front ends pass them: keyword-only ones by keyword."""
    arguments: list[None] = []
    keywords: dict[str, None] = {}
    for parameter in inspect.signature(expected).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = None
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(None)
    return arguments, keywords


def check_passed_on(kind: type, given: Mapping[str, Any], received: Mapping[str, Any]) -> None:
    """Refuse a subclass's `__init__` that keeps for itself what was given for a base class.

    Args:
        kind: the subclass.
        given: keyword arguments of the call.
        received: those that the base class got, None where it got none.

    Raises:
        ConfigurationError: names the argument.
    """
    own = inspect.signature(kind.__init__).parameters if given else {}  # type: ignore[misc]
    for name, value in given.items():
        if name in received and name not in own and value is not None and received[name] is None:
            raise ConfigurationError(
                f"{kind.__name__}({name}={value!r}): its __init__ does not pass {name} on, so that "
                "it would be lost: call super().__init__(**components) there"
            )


def unexpected_arguments(kind: type, given: Mapping[str, Any]) -> ConfigurationError:
    """Return the error for keyword arguments that no `__init__` of a class has taken."""
    known = {
        name
        for base in kind.__mro__[:-1]
        for name, parameter in inspect.signature(base.__init__).parameters.items()  # type: ignore[misc]
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ConfigurationError(
        f"{kind.__name__}({listed}): unknown; expected some of "
        + ", ".join(sorted(known - {"self"}))
    )


_OWN_CLIPPING = ("train_step", "finish_step", "optimizer_step", "clip_gradients")
_OWN_BACKWARD = ("train_step", "accumulate_all", "accumulate", "backward")


def check_capabilities(kind: type, base: type, can: Capabilities) -> None:
    """Refuse a class whose capabilities say that it does what it leaves to the base class.

    Raises:
        ConfigurationError: names the capability.
    """
    if can.owns_clipping and not _overrides(kind, base, _OWN_CLIPPING):
        raise ConfigurationError(
            f"{kind.__name__}.capabilities has owns_clipping=True, but the class overrides none of "
            f"{', '.join(_OWN_CLIPPING)}, so that nothing of its own clips: leave owns_clipping "
            "out, or clip in one of them"
        )
    if not can.manual_backward and not _overrides(kind, base, _OWN_BACKWARD):
        raise ConfigurationError(
            f"{kind.__name__}.capabilities has manual_backward=False, but the class overrides none "
            f"of {', '.join(_OWN_BACKWARD)}, so that it runs backward as user code does: leave "
            "manual_backward out, or override one of them"
        )


def _overrides(kind: type, base: type, names: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(base, name) for name in names)
