"""Checks of a spec against what it describes, by importing it: `stratagem doctor NAME` asks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from types import FunctionType

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.specs import ComponentSpec, StrategySpec
from stratagem.errors import ConfigurationError, PluginError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.author_checks import check_capabilities, check_overrides
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.strategy import Strategy

INTERFACES: dict[str, type] = {
    "accelerator": Accelerator,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "launcher": Launcher,
    "precision": Precision,
    "strategy": Strategy,
}
"""What a component of each kind is an instance of."""


def mistakes_of(spec: ComponentSpec) -> list[str]:
    """Return what is wrong with a component, a sentence each, by importing its target.

    A strategy is also made, with the spec's arguments: no constructor of one asks the machine.

    Example:
        >>> from stratagem.discovery import StrategySpec
        >>> mistakes_of(StrategySpec(name="mine", target="pathlib:Path", api_version=1))
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
    interface = INTERFACES.get(spec.kind)
    if interface is None:
        return []
    if isinstance(target, type):
        if not issubclass(target, interface):
            return [f"its target {spec.target!r} is no subclass of {interface.__name__}"]
        if inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            return [f"its target {spec.target!r} does not define {missing}"]
    elif not callable(target):
        return [f"its target {spec.target!r} is {target!r}; expected a class, or a function"]
    return list(_mistakes_of_strategy(spec)) if isinstance(spec, StrategySpec) else []


def doubts_of(spec: ComponentSpec) -> list[str]:
    """Return what an author has probably not meant, of a component without mistakes.

    Example:
        >>> from stratagem.discovery import StrategySpec
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> class Mine(SingleDeviceStrategy):
        ...     __module__ = "my_package"
        ...     def end_trainig(self, prepared): ...
        >>> doubts_of(StrategySpec(name="mine", target=Mine, api_version=1))
        ['Mine.end_trainig overrides nothing, and nothing calls it; did you mean end_training?']
    """
    target = spec.load()
    if not isinstance(target, type):
        return []
    ours = next(c for c in target.__mro__ if f"{c.__module__}.".startswith("stratagem."))
    known = [name for name in dir(ours) if not name.startswith("_")]
    found = []
    for kind in target.__mro__[: target.__mro__.index(ours)]:
        for name, member in vars(kind).items():
            if name.startswith("_") or name in known or not isinstance(member, FunctionType):
                continue
            if near := get_close_matches(name, known, n=1, cutoff=0.88):
                found.append(
                    f"{kind.__name__}.{name} overrides nothing, and nothing calls it; did you mean "
                    f"{near[0]}?"
                )
    return found


def _missing_module(error: BaseException | None, spec: ComponentSpec) -> str:
    """Return what to say of a module that is of another distribution, and not there."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    own = spec.target.partition(".")[0].partition(":")[0] if isinstance(spec.target, str) else ""
    if not name or name.partition(".")[0] == own:
        return ""
    if name.partition(".")[0] == "stratagem":
        return (
            " (this stratagem-core has no such module: docs/plugin-api.md lists those that plugins "
            "may import)"
        )
    return f" ({name.partition('.')[0]} has to be installed beside it)"


def _mistakes_of_strategy(spec: StrategySpec) -> Iterator[str]:
    # The boundary at which a constructor's failure becomes a sentence of doctor's.
    try:
        made = spec.build()
    except (Exception, SystemExit) as error:
        arguments = ", ".join(f"{name}={value!r}" for name, value in spec.init_args.items())
        yield f"{spec.class_name}({arguments}) failed with {type(error).__name__}: {error}"
        return
    if not isinstance(made, Strategy):
        yield f"its target {spec.target!r} made {made!r}, which is no Strategy"
        return
    kind = type(made)
    own = getattr(made, "capabilities", None)
    if not isinstance(own, Capabilities):
        yield f"{kind.__name__}.capabilities is {own!r}; expected the Capabilities of its spec"
        return
    if own != spec.capabilities:
        yield (
            f"its spec and {kind.__name__}.capabilities differ: {_differences(spec, own)}; let "
            "both hold one object"
        )
    try:
        made.requested  # noqa: B018 - which __init__ sets, or says that it was not called
        check_overrides(kind, Strategy, by_name=True)
        check_capabilities(kind, Strategy, own)
    except ConfigurationError as error:
        yield str(error)


def _differences(spec: StrategySpec, own: Capabilities) -> str:
    return ", ".join(
        f"{field.name} is {getattr(spec.capabilities, field.name)!r} in the spec and "
        f"{getattr(own, field.name)!r} in the class"
        for field in fields(Capabilities)
        if getattr(spec.capabilities, field.name) != getattr(own, field.name)
    )
