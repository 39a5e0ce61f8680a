"""Calls of modules that something else answers, before the hooks of the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import ref

from torch import nn

_ANSWER = "_stratagem_answer"

Answer = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""Receives the module, its own call, the arguments, and the keywords; returns the results."""


class _Redirected:
    """Asks before a call of the module; a subclass, as FSDP2 makes it, so that hooks come after.

    A function in place of the module's `_call_impl` would be compiled with it, and its copies
    would call the original.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super().__call__  # type: ignore[misc]
        held = self.__dict__.get(_ANSWER)
        if held is None or held.answer is None:
            return own(*args, **kwargs)
        return held.answer(self, own, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a copy or a pickle of the module without the redirection."""
        made = super().__reduce_ex__(protocol)
        if not isinstance(made, tuple) or len(made) < 3 or not isinstance(made[2], dict):
            return made
        function, args, state, *others = made
        state = {key: value for key, value in state.items() if key != _ANSWER}
        args = tuple(_original(one) if isinstance(one, type) else one for one in args)
        return function, args, state, *others


class _Held:
    def __init__(self, answer: Answer) -> None:
        self.answer: Answer | None = answer


def redirect(module: nn.Module, answer: Answer) -> None:
    """Let a function answer the calls of a module.

    Args:
        module: the module, which keeps its name and its state.
        answer: receives the module, its own call, the arguments and the keywords.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> redirect(layer, lambda module, call, args, kwargs: 2 * call(*args, **kwargs))
        >>> bool((layer(torch.zeros(2)) == 2 * layer.bias).all())
        True
    """
    if not isinstance(module, _Redirected):
        kind: Any = type(module)
        module.__class__ = _redirected(kind)
    module.__dict__[_ANSWER] = _Held(answer)


@cache
def _redirected(kind: type) -> type:
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind)(kind.__name__, (_Redirected, kind), {**names, "_stratagem_kind": ref(kind)})


def _original(kind: type) -> type:
    if issubclass(kind, _Redirected):
        held = kind.__dict__.get("_stratagem_kind")
        return (held() if held is not None else None) or kind
    return kind


@contextmanager
def redirected(
    modules: Mapping[str, nn.Module], answer: Callable[[str, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Let a function answer the calls of modules for a time.

    Args:
        modules: the modules by name.
        answer: receives the name, the module, the arguments and the keywords.
    """
    kinds = [(module, type(module)) for module in modules.values()]

    def answering(name: str) -> Answer:
        return lambda module, call, args, kwargs: answer(name, module, args, kwargs)

    try:
        for name, module in modules.items():
            redirect(module, answering(name))
        yield
    finally:
        for module, kind in kinds:
            module.__dict__.pop(_ANSWER, None)
            module.__class__ = kind
