"""Checks of a strategy's class and arguments, with errors that name the author's mistake."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from stratagem.discovery.absent import remedy_for
from stratagem.discovery.capabilities import (
    OWN_BACKWARD,
    OWN_CLIPPING,
    OWN_FOLLOWING,
    OWN_STEP,
    Capabilities,
    contradictions,
    difference,
)
from stratagem.discovery.entry_points import is_ours
from stratagem.discovery.former import check_former_names
from stratagem.discovery.registry import nearest_of
from stratagem.discovery.specs import ComponentSpec, StrategySpec
from stratagem.errors import ConfigurationError, PluginError

_checked: set[tuple[type, type, bool]] = set()


def check_overrides(kind: type, base: type, *, by_name: bool = False) -> None:
    """Check that the methods of a class accept the arguments of `base`'s methods.

    Each class is checked once. A class that is not a subclass of `base` is not checked.

    Args:
        kind: the class.
        base: the class that defines the expected signatures.
        by_name: check the names of parameters too. Front ends pass most arguments by position, so
            different names work today, but may fail in later versions.

    Raises:
        ConfigurationError: a method has another signature, overrides a final method, or has or
            uses a former name of the plugin API. The error names the method.

    Example:
        >>> from stratagem.strategies import Strategy, check_overrides
        >>> class Mine(Strategy):
        ...     def teardown(self, now):
        ...         pass
        >>> check_overrides(Mine, Strategy)
        Traceback (most recent call last):
        stratagem.errors.ConfigurationError: Mine.teardown(self, now) cannot be called as ...
    """
    if (kind, base, by_name) in _checked or not issubclass(kind, base):
        return
    check_former_names(kind)
    for name, expected, own in _overridden(kind, base):
        if getattr(expected, "__final__", False):
            raise ConfigurationError(
                f"{kind.__name__}.{name} takes the place of {base.__name__}.{name}, which is "
                "final: it is called as it is; give yours another name"
            )
        if not callable(own):
            raise ConfigurationError(
                f"{kind.__name__}.{name} is a {type(own).__name__}; expected a method, "
                f"{name}{inspect.signature(expected)}"
            )
        if inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own):
            raise ConfigurationError(
                f"{kind.__name__}.{name} "
                + (
                    "is a generator: decorate it with contextlib.contextmanager, if it is to be a "
                    "context, or return what is expected"
                    if inspect.isgeneratorfunction(own)
                    else "is a coroutine, which nobody awaits: define it by def, not async def"
                )
            )
        arguments, keywords = _as_called(expected)
        try:
            inspect.signature(own).bind(*arguments, **keywords)
            if by_name:
                names = list(inspect.signature(expected).parameters)[1 : len(arguments)]
                inspect.signature(own).bind(None, **dict.fromkeys(names), **keywords)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind.__name__}.{name}{inspect.signature(own)} cannot be called as "
                f"{base.__name__}.{name}{inspect.signature(expected)} is ({error}): give it the "
                "same parameters"
            ) from None
    _checked.add((kind, base, by_name))


def _overridden(kind: type, base: type) -> Iterator[tuple[str, FunctionType, Any]]:
    for name in dir(base):
        expected = inspect.getattr_static(base, name)
        is_called = isinstance(expected, FunctionType) and not hasattr(expected, "for_users")
        if is_called and not name.startswith("_") and (own := getattr(kind, name)) is not expected:
            yield name, expected, own


def _as_called(expected: FunctionType) -> tuple[list[None], dict[str, None]]:
    """Return positional and keyword arguments as the front ends pass them."""
    arguments: list[None] = []
    keywords: dict[str, None] = {}
    for parameter in inspect.signature(expected).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = None
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(None)
    return arguments, keywords


def uncalled_methods(kind: type) -> Iterator[tuple[type, str]]:
    """Yield (class, name) of the public methods of an author's class that nothing calls.

    Its base class in Stratagem has no such method, and no code in the author's packages names it.

    Example:
        >>> from stratagem.strategies import SingleDeviceStrategy, uncalled_methods
        >>> class Mine(SingleDeviceStrategy):
        ...     __module__ = "__main__"
        ...     def average(self): ...
        >>> [name for _, name in uncalled_methods(Mine)]
        ['average']
    """
    ours = _base_of_ours(kind)
    authors = kind.__mro__[: kind.__mro__.index(ours)]
    named: set[str] = set()
    packages = {each.__module__.partition(".")[0] for each in authors}
    for module in [sys.modules[each] for each in sys.modules if each.partition(".")[0] in packages]:
        here = (each for each in vars(module).values() if isinstance(each, type))
        own = [each for each in here if each.__module__ == module.__name__]
        places: list[type | ModuleType] = [module, *own, *authors]
        for _, code in (found for each in places for found in _code_of(each)):
            if code.co_flags & inspect.CO_OPTIMIZED:  # class bodies define attributes by names
                names = (each for each in code.co_consts if isinstance(each, str))
                named |= {*code.co_names, *names}
    for each in authors:
        for name, member in vars(each).items():
            is_own = isinstance(member, FunctionType) and not name.startswith("_")
            if is_own and not hasattr(ours, name) and name not in named:
                yield each, name


def _code_of(owner: type | ModuleType) -> Iterator[tuple[str, CodeType]]:
    """Yield the code of a class's methods, and of the functions within them, by method.

    Args:
        owner: a class, or a module, for its functions.
    """
    for method, value in list(vars(owner).items()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        for code in _nested(getattr(function, "__code__", None)):
            yield method, code


def _nested(code: object) -> Iterator[CodeType]:
    if isinstance(code, CodeType):
        yield code
        for each in code.co_consts:
            yield from _nested(each)


def _base_of_ours(kind: type) -> type:
    return next((each for each in kind.__mro__ if is_ours(each.__module__)), object)


def misspelled_methods(kind: type) -> list[str]:
    """Return a hint for each method that nothing calls and whose name is similar to a known name.

    Names of other libraries and of former versions are known too.

    Example:
        >>> from stratagem.strategies import SingleDeviceStrategy, misspelled_methods
        >>> class Mine(SingleDeviceStrategy):
        ...     __module__ = "__main__"
        ...     def end_trainig(self, prepared): ...
        >>> misspelled_methods(Mine)
        ['Mine.end_trainig overrides nothing, and nothing calls it. Did you mean end_training?']
    """
    known = [name for name in dir(_base_of_ours(kind)) if not name.startswith("_")]
    added = [name for name in dir(kind) if not name.startswith("_") and name not in known]
    advice = {name: _advice(kind, name, known) for name in added}
    if not any(advice.values()):
        return []  # most classes; the search for calls takes longer
    return [
        f"{owner.__name__}.{name} overrides nothing, and nothing calls it. {advice[name]}"
        for owner, name in uncalled_methods(kind)
        if advice[name]
    ]


def _advice(kind: type, name: str, known: list[str]) -> str:
    near = nearest_of(name, known, cutoff=0.88)
    return remedy_for(kind, name) or (f"Did you mean {near}?" if near else "")


def unexpected_arguments(kind: type, given: Mapping[str, Any]) -> ConfigurationError:
    """Return the error for keyword arguments that no `__init__` of a class accepts."""
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


def context_of(method: Callable[..., Any], *arguments: Any) -> AbstractContextManager[Any]:
    """Return the context manager that a strategy's method returns.

    Raises:
        PluginError: the method returned another object.

    Example:
        >>> from contextlib import nullcontext
        >>> from stratagem.strategies import context_of
        >>> with context_of(lambda: nullcontext("entered")) as entered:
        ...     print(entered)
        entered
    """
    context = method(*arguments)
    if not isinstance(context, AbstractContextManager):
        raise PluginError(
            f"{method.__qualname__} returned {context!r}; expected a context manager: decorate it "
            "with contextlib.contextmanager and yield once, or return contextlib.nullcontext()"
        )
    return context


def check_capabilities(kind: type, base: type, can: Capabilities) -> None:
    """Check that a class implements the steps that its capabilities claim.

    Raises:
        ConfigurationError: the class leaves a claimed step to the base class. The error names the
            capability.

    Example:
        >>> from stratagem.strategies import Capabilities, Strategy, check_capabilities
        >>> class Mine(Strategy):
        ...     capabilities = Capabilities(engine_steps=True)
        >>> check_capabilities(Mine, Strategy, Mine.capabilities)
        Traceback (most recent call last):
        stratagem.errors.ConfigurationError: Mine.capabilities has engine_steps=True, but ...
    """

    def overrides(methods: Iterable[str], says: Callable[[Capabilities], bool]) -> bool:
        # A method inherited from a class that does not claim the capability does not count.
        without = next(
            each for each in kind.__mro__ if each is base or says(_said_by(each, can)) is False
        )
        return any(getattr(kind, name) is not getattr(without, name) for name in methods)

    for text in contradictions(
        kind.__name__,
        can,
        clips=overrides(OWN_CLIPPING, lambda said: said.engine_clips),
        steps=overrides(OWN_STEP, lambda said: said.engine_steps),
        runs_backward=overrides(OWN_BACKWARD, lambda said: not said.manual_backward),
        follows=overrides(OWN_FOLLOWING, lambda said: said.follows_evaluation),
    ):
        raise ConfigurationError(text)


def _said_by(kind: type, otherwise: Capabilities) -> Capabilities:
    """Return the capabilities of a class; `otherwise` for a class without any, such as a mixin."""
    said = getattr(kind, "capabilities", None)
    return said if isinstance(said, Capabilities) else otherwise


def check_strategy(strategy: object, spec: ComponentSpec | None, base: type) -> None:
    """Check that an object is a strategy and has the capabilities of its spec.

    Args:
        strategy: the object that the spec's target returned.
        spec: its spec; None for a strategy that the user passed as an object. Its own capabilities
            apply then.
        base: Strategy.

    Raises:
        PluginError: the object is no strategy, or differs from its spec. The error names the class
            and the differences.
    """
    if not isinstance(spec, StrategySpec):
        return
    who = f"the target of the strategy {spec.name!r}"
    if not isinstance(strategy, base):
        raise PluginError(
            f"{who} returned a {type(strategy).__name__}; expected a subclass of "
            "stratagem.strategies.Strategy"
        )
    own = getattr(strategy, "capabilities", None)
    if text := difference(type(strategy).__name__, spec.capabilities, own):
        raise PluginError(f"{who}: {text}")
