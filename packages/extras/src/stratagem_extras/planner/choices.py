"""The rows of a plan: strategies, with the sizes that a user names or that a strategy proposes."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import ConfigurationError
from stratagem_extras.planner.devices import Device
from stratagem_extras.planner.modules import ModuleMemory

_log = logging.getLogger(__name__)

_CALL = re.compile(r"\s*([^\s()]+)\s*(\(.*\))\s*", re.DOTALL)
_MOST_CANDIDATES = 12


@dataclass(frozen=True)
class Choice:
    """A strategy with its arguments.

    Attributes:
        spec: the strategy; the arguments are among its preset ones.
        arguments: the arguments in addition to the preset ones of the name.
        alike: names of strategies with the same memory use.
        is_candidate: the strategy has proposed the arguments, not the user.
        proposal: the strategy's judgement of the arguments, if its class has `propose`.
    """

    spec: StrategySpec
    arguments: Mapping[str, Any] = field(default_factory=dict)
    alike: tuple[str, ...] = ()
    is_candidate: bool = False
    proposal: Any = None

    @property
    def name(self) -> str:
        """The name of the row, such as "mesh(tensor=2)"."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.spec.name}({given})" if given else self.spec.name

    @property
    def has_sizes(self) -> bool:
        """Whether the class proposes candidates, and this choice has arguments."""
        return bool(self.arguments) and len(_proposed(self.spec, 2, 1)) > 1

    def in_python(self) -> tuple[str, str]:
        """Return the import and the call of the class, for a choice with arguments; else "", ""."""
        if not self.arguments:
            return "", ""
        kind = self.spec.load()
        given = ", ".join(f"{name}={value!r}" for name, value in self.spec.init_args.items())
        module = _module_of(kind)
        line = "" if module == "__main__" else f"from {module} import {kind.__name__}"
        return line, f"{kind.__name__}({given})"


@dataclass(frozen=True)
class SizesJob:
    """The argument of a strategy's class method `propose`.

    It returns objects with the attributes `arguments`, `seconds`, `cost`, `ranks_of_batch`,
    `memory`, `is_simulated`, `reasons` and `why_not`, the best first.

    Attributes:
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        usable: bytes of a device that a plan fills.
        links: the device.
        operations: floating-point operations per second that a model reaches on a device.
        micro_batches: of a step.
        model: the model without values.
        parts: the parts of the model in the order of calls.
        converted: bytes of the tensors of a micro-batch that the precision converts, afterwards.
        named: arguments of the class that the user names, whose rows need a time too.
        simulate: returns the moments of a step for each of some arguments, on numbers of devices
            and nodes, or why the strategy refuses the arguments.
        refusal: returns why the strategy refuses arguments, by a step of few layers; "".
    """

    devices: int
    num_nodes: int
    usable: int
    links: Device
    operations: float
    micro_batches: int
    model: nn.Module
    parts: Sequence[ModuleMemory]
    converted: int
    named: Sequence[Mapping[str, Any]]
    simulate: Callable[[Sequence[Mapping[str, int]], int, int], Sequence[Any]]
    refusal: Callable[[Mapping[str, int], int, int], str]


def parse_strategy(text: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name of a strategy and its arguments; None: without parentheses.

    Raises:
        ConfigurationError: an argument has no keyword, or is not a literal.

    Example:
        >>> parse_strategy("mesh(tensor=2, context=2)")
        ('mesh', {'tensor': 2, 'context': 2})
        >>> parse_strategy("fsdp")
        ('fsdp', None)
    """
    if "(" not in text:
        return text, None
    try:
        found = _CALL.fullmatch(text)
        call = ast.parse(f"strategy{found[2]}", mode="eval").body if found else None
        if (
            found is None
            or not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.args
        ):
            raise ValueError(text)
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError(text)
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigurationError(
            f"strategy {text!r}: expected a name, or a name with literals by keyword, such as "
            "'mesh(tensor=2, context=2)'. For other arguments, register a name: "
            "StrategyRegistry.register('mine', MeshStrategy, description='...', tensor=2)"
        ) from None
    return found[1], arguments


def chosen(text: str) -> Choice:
    """Return the choice that a text names, without candidates.

    Raises:
        UnknownNameError: the strategy is not installed.
        ConfigurationError: as `parse_strategy`.
    """
    name, arguments = parse_strategy(text)
    spec: Any = get_registry().find("strategy", name).spec
    return with_arguments(Choice(spec), arguments or {})


def check_names(names: Iterable[str]) -> None:
    """Check the names of strategies and the arguments of their classes, before a model is built.

    Raises:
        UnknownNameError: a strategy is not installed.
        ConfigurationError: as `parse_strategy`; or the class refuses the arguments.
    """
    for text in names:
        choice = chosen(text)
        if choice.arguments:
            try:
                choice.spec.build()
            except ConfigurationError:
                raise
            except Exception as error:  # such as a package that is missing, which its row says
                _log.debug("%s cannot be built: %s", text, error)


def with_arguments(choice: Choice, arguments: Mapping[str, Any]) -> Choice:
    """Return a choice with further arguments of the class."""
    if not arguments:
        return choice
    spec = replace(choice.spec, init_args={**choice.spec.init_args, **arguments})
    return replace(choice, spec=spec, arguments={**choice.arguments, **arguments}, alike=())


def named_choices(
    names: Sequence[str],
    sizes_of: Callable[[Choice, Sequence[Mapping[str, Any]]], Iterable[Choice]],
) -> list[Choice]:
    """Return the choices that a user names, each with the sizes of its class.

    Args:
        names: names of strategies. One with parentheses has its own sizes.
        sizes_of: returns the choices that have sizes, given a choice without and the arguments
            with which the user names its class too.

    Raises:
        UnknownNameError: a strategy is not installed.
        ConfigurationError: as `parse_strategy`.
    """
    given = [chosen(text) for text in names]
    more: list[Choice] = []
    for text, choice in zip(names, given, strict=True):
        if "(" not in text:
            named = [each.arguments for each in given if each.arguments and _alike(each, choice)]
            more += sizes_of(choice, named)
    proposed = {choice.name: choice for choice in more}
    given = [proposed.pop(choice.name, choice) for choice in given]
    return [*given, *proposed.values()]


def _alike(one: Choice, other: Choice) -> bool:
    return one.spec.name == other.spec.name


def candidates(choice: Choice, devices: int, num_nodes: int) -> list[Choice]:
    """Return the sizes that a strategy proposes, for a name that presets no size.

    Args:
        choice: the strategy.
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
    """
    proposed = [each for each in _proposed(choice.spec, devices, num_nodes) if each]
    if any(name in choice.spec.init_args for each in proposed for name in each):
        return []
    return [replace(with_arguments(choice, each), is_candidate=True) for each in proposed]


def installed_choices(groups: Iterable[Sequence[StrategySpec]]) -> list[Choice]:
    """Return one choice for each group of strategies with the same memory use."""
    return [Choice(first, alike=tuple(spec.name for spec in rest)) for first, *rest in groups]


def class_of(spec: StrategySpec) -> Any:
    """Return the class of a strategy; without a package that it needs, no class."""
    try:
        return spec.load()
    except Exception:
        return None


def _proposed(spec: StrategySpec, devices: int, num_nodes: int) -> Sequence[Mapping[str, Any]]:
    propose = getattr(class_of(spec), "candidates", None)
    return () if propose is None else tuple(propose(devices, num_nodes))[:_MOST_CANDIDATES]


def _module_of(kind: type) -> str:
    """Return the module from which users import a class."""
    return next(name for name in _modules_of(kind) if _has(name, kind))


def _has(module: str, kind: type) -> bool:
    return getattr(sys.modules.get(module), kind.__name__, None) is kind or (
        module == kind.__module__
    )


def _modules_of(kind: type) -> Iterator[str]:
    root, *rest = kind.__module__.split(".")
    yield root
    yield "stratagem.strategies"
    for name in rest:
        root = f"{root}.{name}"
        yield root
