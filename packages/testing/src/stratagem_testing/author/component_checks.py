"""Checks of a spec against what it describes, by importing it: `stratagem doctor NAME` asks."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from stratagem.accelerators import Accelerator
from stratagem.checkpoint import CheckpointIO
from stratagem.discovery import (
    Capabilities,
    ComponentSpec,
    StrategySpec,
    load_target,
    one_process_of,
)
from stratagem.environments import ClusterEnvironment
from stratagem.errors import ConfigurationError, PluginError
from stratagem.launch import Launcher
from stratagem.precision import Precision
from stratagem.strategies import (
    Strategy,
    check_capabilities,
    check_overrides,
    misspelled_methods,
)

INTERFACES: dict[str, type | str] = {
    "accelerator": Accelerator,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "launcher": Launcher,
    # These lie above.
    "logger": "stratagem.loggers:Logger",
    "callback": "stratagem.callbacks:Callback",
    "profiler": "stratagem.profilers:Profiler",
    "name": object,
    "precision": Precision,
    "strategy": Strategy,
}
"""What a component of each kind is an instance of."""

_SAID_TWICE = {
    "accelerator": ("requires_dedicated_strategies", "data_parallel_kernels"),
    "precision": ("name", "shardable"),
    "launcher": (
        *("interactive", "new_processes", "spans_nodes", "devices_elsewhere"),
        "cluster_environment",
    ),
}
"""The fields of a spec that its class has too."""
_OF_ONE_KIND = {"accelerator": ("process_group_backend",)}
"""What an interface only annotates, so that each class, or what is made of it, has its own."""
_FUNCTIONS = {"probe": 0, "incompatible_because": 1, "local_world_size": 1}
"""The fields that name a function, and with how many arguments it is called."""
_NOT_MADE = ("cluster_environment", "logger", "callback", "profiler")
"""Kinds whose constructors read the machine, may write, or take what only a user knows."""
_PARALLEL = "stratagem.strategies:ParallelStrategy"


def kinds() -> list[str]:
    """Return the kinds of component that an installed distribution may provide.

    Example:
        >>> "logger" in kinds()
        True
    """
    return list(INTERFACES)


def interface_of(spec: ComponentSpec) -> Any:
    """Return the class of which a component is an instance.

    Example:
        >>> from stratagem.discovery import LoggerSpec
        >>> interface_of(LoggerSpec(name="mine", target="my_package:Mine", api_version=2)).__name__
        'Logger'
    """
    named = INTERFACES[spec.kind]
    return load_target(named, what=f"the interface of a {spec.kind}")


def mistakes_of(spec: ComponentSpec) -> list[str]:
    """Return the mistakes of a component, a sentence each, by importing its target.

    A strategy is also made, with the spec's arguments: no constructor of one asks the machine.

    Example:
        >>> from stratagem.discovery import StrategySpec
        >>> mistakes_of(StrategySpec(name="mine", target="pathlib:Path", api_version=2))
        ["its target 'pathlib:Path' is no subclass of Strategy"]
    """
    try:
        target = spec.load()
    except PluginError as error:
        cause = error.__cause__
        return [
            f"its target {spec.target!r} cannot be imported: {type(cause).__name__}: {cause}"
            + _missing_module(cause, spec)
        ]
    if spec.kind == "name":
        return []  # it may be anything
    interface = interface_of(spec)
    if isinstance(target, type):
        if not issubclass(target, interface):
            return [f"its target {spec.target!r} is no subclass of {interface.__name__}"]
        if inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            return [f"its target {spec.target!r} does not define {missing}"]
    elif not callable(target):
        return [f"its target {spec.target!r} is {target!r}; expected a class, or a function"]
    return [*_wrong_functions(spec), *_mistakes_of_made(spec, target, interface)]


def doubts_of(spec: ComponentSpec) -> list[str]:
    """Return the probable mistakes of a component that has no certain one.

    Example:
        >>> from stratagem.discovery import StrategySpec
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> class Mine(SingleDeviceStrategy):
        ...     __module__ = "__main__"
        ...     def end_trainig(self, prepared): ...
        >>> doubts_of(StrategySpec(name="mine", target=Mine, api_version=2))
        ['Mine.end_trainig overrides nothing, and nothing calls it. Did you mean end_training?']
    """
    target = spec.load()
    return misspelled_methods(target) if isinstance(target, type) else []


def _missing_module(error: BaseException | None, spec: ComponentSpec) -> str:
    """Return what to say of a module that is of another distribution, and not there."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    own = spec.target.partition(".")[0].partition(":")[0] if isinstance(spec.target, str) else ""
    if not name or name.partition(".")[0] == own:
        return ""
    if name.partition(".")[0] == "stratagem":
        return (
            " (this stratagem-core has no such module: docs/extend/plugin-api.md lists the modules "
            "that plugins may import)"
        )
    return f" ({name.partition('.')[0]} has to be installed beside it)"


def _wrong_functions(spec: ComponentSpec) -> Iterator[str]:
    """Yield which functions that a spec names are not there, or are none of their arguments."""
    for field, count in _FUNCTIONS.items():
        named = getattr(spec, field, None)
        if named is None:
            continue
        try:
            inspect.signature(load_target(named, what=field)).bind(*[None] * count)
        except PluginError as error:
            cause = error.__cause__
            yield f"its {field} {named!r} cannot be imported: {type(cause).__name__}: {cause}"
        except TypeError as error:
            yield f"its {field} {named!r} cannot be called with {count} argument(s): {error}"
        except ValueError:
            pass  # of a builtin, which has no signature


def _mistakes_of_made(spec: ComponentSpec, target: Any, interface: type) -> Iterator[str]:
    arguments = ", ".join(f"{name}={value!r}" for name, value in spec.init_args.items())
    # The boundary at which a constructor's failure becomes a sentence of doctor's.
    try:
        if spec.kind in _NOT_MADE:
            inspect.signature(target).bind(**spec.init_args)
            made = None
        else:
            made = spec.build()
    except (Exception, SystemExit) as error:
        yield f"{spec.class_name}({arguments}) failed with {type(error).__name__}: {error}"
        return
    if spec.kind not in _NOT_MADE and not isinstance(made, interface):
        yield f"its target {spec.target!r} made {made!r}, which is no {interface.__name__}"
        return
    kind = target if made is None else type(made)
    if isinstance(kind, type):
        try:
            check_overrides(kind, interface, by_name=True)
        except ConfigurationError as error:
            yield str(error)
    if isinstance(made, Strategy) and isinstance(spec, StrategySpec):
        yield from _mistakes_of_strategy(spec, made)
    elif made is not None:
        yield from _mistakes_of_fields(spec, made)


def _mistakes_of_fields(spec: ComponentSpec, made: object) -> Iterator[str]:
    """Yield which attributes are missing, or are not what the spec says."""
    name = type(made).__name__
    for field in _OF_ONE_KIND.get(spec.kind, ()):
        if not hasattr(made, field):
            yield f"{name} has no {field}, which each {spec.kind} has to set"
    for field in _SAID_TWICE.get(spec.kind, ()):
        said, own = getattr(spec, field), getattr(made, field, None)
        # A class of launchers may serve several names: it says the least that all of them can do.
        is_least = spec.kind == "launcher" and own == getattr(Launcher, field)
        if said != own and not is_least:
            yield (
                f"its spec says {field}={said!r}, and {name} {field}={own!r}: a plan is made by "
                "the first and run by the second; let both be the same"
            )


def _mistakes_of_strategy(spec: StrategySpec, made: Strategy) -> Iterator[str]:
    kind = type(made)
    own: object = getattr(made, "capabilities", None)
    if not isinstance(own, Capabilities):
        yield f"{kind.__name__}.capabilities is {own!r}; expected the Capabilities of its spec"
        return
    if own != spec.capabilities:
        yield (
            f"its spec and {kind.__name__}.capabilities differ: {_differences(spec, own)}; let "
            "both hold one object"
        )
    parallel = load_target(_PARALLEL, what="the base of strategies of several processes")
    if isinstance(made, parallel) and own.one_process and own.many_devices:
        yield one_process_of(kind.__name__)
    if why := _why_not_initialized(made):
        yield why
    try:
        check_capabilities(kind, Strategy, own)
    except ConfigurationError as error:
        yield str(error)


def _why_not_initialized(strategy: object) -> str:
    """Return a text on how an `__init__` drops its base class's arguments, or "" if no one does."""
    if "requested" not in vars(strategy):
        name = type(strategy).__name__
        return f"{name}.__init__ does not call super().__init__(**components): call it first"
    for kind in type(strategy).__mro__[: type(strategy).__mro__.index(Strategy)]:
        code = getattr(vars(kind).get("__init__"), "__code__", None)
        if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
            continue
        last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        taken = code.co_varnames[last]
        # The argument of some instructions is a pair of names.
        read = [name for each in dis.get_instructions(code) for name in _names(each.argval)]
        if taken not in read:
            return (
                f"{kind.__name__}.__init__ takes **{taken} and does not pass it on, so that "
                f"options such as launcher= are lost: call super().__init__(**{taken}) first"
            )
    return ""


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _differences(spec: StrategySpec, own: Capabilities) -> str:
    return ", ".join(
        f"{field.name} is {getattr(spec.capabilities, field.name)!r} in the spec and "
        f"{getattr(own, field.name)!r} in the class"
        for field in fields(Capabilities)
        if getattr(spec.capabilities, field.name) != getattr(own, field.name)
    )
