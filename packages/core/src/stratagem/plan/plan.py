"""RunRequest, Draft and RunPlan: the request, its choices so far, and the plan with all reasons."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from stratagem.discovery.capabilities import START_METHODS, Capabilities
from stratagem.discovery.former import with_former_names
from stratagem.discovery.registry import Candidate, Registry
from stratagem.discovery.specs import (
    Availability,
    ClusterEnvironmentSpec,
    ComponentSpec,
    StrategySpec,
    asked_function,
)
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.plan.step_options import StepOptions

NAMED = "your argument"
"""Why a component was chosen that the user named."""

GIVEN = "given as an object"
"""Stands for the provider of an object that the user passed."""


@final
@dataclass(frozen=True)
class Selection:
    """A component of a plan, with its provider and the reason for the choice."""

    kind: str
    name: str
    provider: str
    why: str
    source: Any = field(repr=False)
    """The component's spec, or the user's object."""

    @property
    def spec(self) -> ComponentSpec | None:
        """The component's spec, or None for an object of the user's."""
        return self.source if isinstance(self.source, ComponentSpec) else None

    def build(self) -> Any:
        """Import and build the component, or return the object that the user gave."""
        return self.source.build() if isinstance(self.source, ComponentSpec) else self.source


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster environment and the processes that it has started.

    Attributes:
        environment: the cluster environment.
        launched_this_process: whether the cluster has started this process as a rank.
        why_not_started: if the user named the environment, the reason why it has not started this
            process; "" otherwise.
        rejected: the environments that do not apply here, each with the reason.
        environ: the environment variables.
    """

    environment: Selection
    launched_this_process: bool
    why_not_started: str = ""
    rejected: tuple[Selection, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.environment.name

    @property
    def world_size(self) -> int | None:
        """The number of ranks that the cluster has started, if known."""
        return self._number("world_size")

    @property
    def local_world_size(self) -> int | None:
        """The number of ranks on this node, if known."""
        return self._number("local_world_size")

    @property
    def rank(self) -> int | None:
        """The rank of this process, if known."""
        return self._number("rank")

    def said_by(self, *what: str) -> str:
        """Return the variables that hold these numbers, with their values, in parentheses."""
        names = (getattr(self.environment.spec, f"{each}_variable", "") for each in what)
        said = ", ".join(f"{name}={self.environ[name]}" for name in names if name in self.environ)
        return said and f" ({said})"

    def _number(self, what: str) -> int | None:
        spec = self.environment.spec
        if not isinstance(spec, ClusterEnvironmentSpec):
            source = self.environment.source
            return int(getattr(source, "global_rank" if what == "rank" else what)())
        if what == "local_world_size" and spec.local_world_size is not None:
            return int(asked_function(spec, "local_world_size", self.environ))
        variable = str(getattr(spec, f"{what}_variable"))
        text = self.environ.get(variable)
        if text is None:
            return None
        if not text.strip().isdigit():
            raise ConfigurationError(
                f"the cluster environment {self.name!r} expects a number in {variable}, "
                f"received {variable}={text!r}"
            )
        return int(text)


@dataclass
class Draft:
    """The request, the available components, and the choices so far.

    `resolve` sets the attributes from `named` on in this order, and each choice reads the earlier
    ones. An attribute that is not set yet raises AttributeError.

    Attributes:
        request: the user's request.
        registry: the registry of components.
        probe: a function that returns the availability of an accelerator (its spec, or an object).
        preset: the components that were passed to the strategy or its registration, by kind.
        named: the strategy that the user named, or None.
        cluster: the cluster environment and its processes.
        requested_launcher: the launcher that the request or the strategy names, or None.
        accelerator: the accelerator.
        availability: the result of its probe.
        devices: the device indices on this node.
        devices_why: the reason for the choice of devices.
        strategy: the strategy.
        num_nodes: the number of nodes.
        launcher: the launcher.
    """

    request: RunRequest
    registry: Registry
    probe: Callable[[Any], Availability]
    preset: Mapping[str, Any] = field(default_factory=dict)
    named: Selection | None = None
    cluster: Cluster = field(init=False)
    requested_launcher: Selection | None = None
    accelerator: Selection = field(init=False)
    availability: Availability = field(init=False)
    devices: tuple[int, ...] = field(init=False)
    devices_why: str = field(init=False)
    strategy: Selection = field(init=False)
    num_nodes: int = field(init=False)
    launcher: Selection = field(init=False)

    @property
    def wanted(self) -> Capabilities | None:
        """The capabilities of the strategy that the user named, or None."""
        return None if self.named is None else capabilities_of(self.named)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the chosen strategy."""
        return capabilities_of(self.strategy)

    @property
    def elsewhere(self) -> Selection | None:
        """The requested launcher, if its devices are not on this machine."""
        launcher = self.requested_launcher
        return launcher if supports(launcher, "devices_elsewhere") else None

    def find(self, kind: str, name: str, why: str) -> Selection:
        """Return the component of a name; see `Registry.find` for its errors.

        If the user named it and another distribution claims the same name, a warning says that
        core's component is used.
        """
        candidate = self.registry.find(kind, name)
        others = self.registry.shadowed(candidate, name)
        if others and why == NAMED:
            warnings.warn(
                f"the {kind.replace('_', ' ')} {name!r} is that of {candidate.distribution}, which "
                f"the name is reserved for; {' and '.join(map(repr, others))} is another one",
                stacklevel=2,
            )
        return selection_of(candidate, why)

    def asked(self, kind: str, default: Any) -> Any:
        """Return the requested value, from the request or from the strategy's own arguments.

        Raises:
            ConfigurationError: if the two request different values.
        """
        in_request = getattr(self.request, kind)
        in_strategy = self.preset.get(kind)
        if in_request is None or in_request == default:
            return default if in_strategy is None else in_strategy
        if in_strategy is not None and in_strategy != in_request:
            raise ConfigurationError(
                f"{kind}={in_request!r} was passed, but the strategy was made with "
                f"{kind}={in_strategy!r}: give it in one place"
            )
        return in_request


def selection_of(candidate: Candidate, why: str) -> Selection:
    """Return the selection of a component that the registry holds."""
    provider = f"{candidate.distribution} {candidate.version}"
    return Selection(candidate.spec.kind, candidate.spec.name, provider, why, candidate.spec)


def given(kind: str, component: Any, *, method: str, base: str) -> Selection:
    """Return the selection of an object that the user passed.

    Args:
        kind: "checkpoint_io" and so on.
        component: the object.
        method: an attribute that every such object has.
        base: the class to subclass, for the error.

    Raises:
        ConfigurationError: the object has no such attribute, or is a class.
    """
    if isinstance(component, type) or not hasattr(component, method):
        raise ConfigurationError(
            f"{kind}={component!r}: expected a name or an instance of {base}"
            + (", received a class: call it" if isinstance(component, type) else "")
        )
    return Selection(kind, type(component).__name__, GIVEN, "you passed it", component)


def capabilities_of(strategy: Selection) -> Capabilities:
    """Return the capabilities of a strategy, from its spec or its class."""
    spec = strategy.spec
    if isinstance(spec, StrategySpec):
        return spec.capabilities
    capabilities: Capabilities = strategy.source.capabilities
    return capabilities


def presets(strategy: Selection | None) -> dict[str, Any]:
    """Return the components that a strategy was given when it was made or registered, by kind."""
    if strategy is None:
        return {}
    if strategy.spec is None:
        return dict(strategy.source.requested)
    arguments = strategy.spec.init_args
    renamed = {"precision": "precision_plugin"}
    kinds = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher")
    presets = {kind: arguments.get(renamed.get(kind, kind)) for kind in kinds}
    if presets["launcher"] is None and "start_method" in arguments:
        presets["launcher"] = START_METHODS.get(arguments["start_method"])
    return {kind: value for kind, value in presets.items() if value is not None}


def supports(launcher: Selection | None, what: str) -> bool:
    """Return a flag of a launcher's spec or class; False without a launcher."""
    return launcher is not None and bool(getattr(launcher.source, what, what == "starts_ranks"))


def accepts(accepted: tuple[str, ...] | None, accelerator: Selection) -> bool:
    """Whether a list of accelerator names holds this one, under its name or an alias."""
    if accepted is None:
        return True
    aliases = () if accelerator.spec is None else accelerator.spec.aliases
    return not {accelerator.name, *aliases}.isdisjoint(accepted)


def is_compatible(capabilities: Capabilities, accelerator: Selection) -> bool:
    """Whether a strategy of these capabilities can use an accelerator."""
    if capabilities.accelerators is None:
        return not getattr(accelerator.source, "requires_dedicated_strategies", False)
    return accepts(capabilities.accelerators, accelerator)


def either(names: tuple[str, ...] | None) -> str:
    """Return names as an error lists them."""
    return " or ".join(repr(name) for name in names or ())


def is_interactive() -> bool:
    """Whether this process is a notebook kernel or an interactive interpreter."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


@final
@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The user's request. Each component is a discovered name or an object.

    Attributes:
        accelerator: a name, an Accelerator, or "auto".
        devices: the number of devices (an int), their indices ("1, 4" or [1, 4]), -1 for all, or
            "auto". None means the CPU.
        num_nodes: the number of machines; 1 also means the cluster's number.
        strategy: a name, a Strategy, or "auto".
        precision: a name, a Precision, 64, 32, 16 or "bf16".
        checkpoint_io: a name, a CheckpointIO, or None for the default.
        async_save: whether checkpoints are written in the background.
        cluster_environment: a name, a ClusterEnvironment, or None to detect it.
        launcher: a name, a Launcher, or None for the strategy's own.
        environ: the environment variables at the time of the request.
        step_options: the options of the Trainer's optimizer steps. None under Lite.
        ordinal: the number of earlier requests of this process. A rank that runs the script again
            uses this number to recognize requests from before the launch.
        interactive: whether this is a notebook or an interactive interpreter.
    """

    accelerator: Any = "auto"
    devices: int | str | list[int] | tuple[int, ...] | None = "auto"
    num_nodes: int = 1
    strategy: Any = "auto"
    precision: Any = "32-true"
    checkpoint_io: Any = None
    async_save: bool = False
    step_options: StepOptions | None = None
    cluster_environment: Any = None
    launcher: Any = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    ordinal: int = 0
    interactive: bool = field(default_factory=is_interactive)


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The components of a run and the reasons for their choice, as `resolve` returns them."""

    request: RunRequest
    accelerator: Selection
    devices: tuple[int, ...]
    """Device indices on this node, one for each local process or virtual device."""
    devices_why: str
    strategy: Selection
    capabilities: Capabilities
    precision: Selection
    cluster_environment: Selection
    launcher: Selection
    checkpoint_io: Selection
    num_nodes: int
    rejected_environments: tuple[Selection, ...] = ()
    """The cluster environments that were looked for and not taken, with the reason of each."""

    @property
    def processes_per_node(self) -> int:
        """How many ranks run on each node."""
        return 1 if self.capabilities.one_process else len(self.devices)

    @property
    def world_size(self) -> int:
        """How many ranks run in all."""
        return self.processes_per_node * (1 if self.capabilities.one_process else self.num_nodes)

    @property
    def remote(self) -> bool:
        """Whether the ranks are new processes, so that the launching process is not a rank."""
        return bool(getattr(self.launcher.source, "new_processes", False))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return a row (kind, choice, provider, reason) for each choice."""

        def row(selected: Selection, what: str = "") -> tuple[str, str, str, str]:
            return what or selected.kind, selected.name, selected.provider, selected.why

        world = f"{self.num_nodes} node(s) of {self.processes_per_node} process(es)"
        return [
            row(self.strategy),
            row(self.accelerator),
            ("devices", ", ".join(map(str, self.devices)), "", self.devices_why),
            ("world_size", str(self.world_size), "", world),
            row(self.precision),
            row(self.cluster_environment),
            *(row(rejected, "  not taken") for rejected in self.rejected_environments),
            row(self.launcher),
            row(self.checkpoint_io),
        ]

    def explain(self, *, why: bool = False) -> str:
        """Return the plan as text, a line for each choice and its reason.

        Args:
            why: also say which cluster environments were not taken, and why not.
        """
        shown = (row for row in self.rows() if why or not row[0].startswith(" "))
        rows = [(row[0], _shortened(row[1]), *row[2:]) for row in shown]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True))
            for row in rows
        )


def _shortened(choice: str) -> str:
    """Return a list of many devices with its ends only."""
    ends = choice.split(", ")
    return f"{ends[0]}, {ends[1]}, ..., {ends[-1]}" if len(ends) > 8 else choice
