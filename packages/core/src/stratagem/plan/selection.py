"""Selection: a component that was chosen, and why; and how one is looked up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from stratagem.discovery.capabilities import START_METHODS, Capabilities
from stratagem.discovery.registry import Candidate, Registry
from stratagem.discovery.specs import Availability, ComponentSpec, StrategySpec
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.plan.plan import RunRequest

NAMED = "you named it"
"""Why a component was chosen that the user named."""

GIVEN = "given as an object"
"""Stands for the provider of an object that the user passed."""


@final
@dataclass(frozen=True)
class Selection:
    """A component of a plan: what it is, who provides it, and why it was chosen."""

    kind: str
    name: str
    provider: str
    why: str
    source: Any = field(repr=False)
    """Its spec, or the object that the user gave."""

    @property
    def spec(self) -> ComponentSpec | None:
        """Its spec, or None if the user gave an object."""
        return self.source if isinstance(self.source, ComponentSpec) else None

    def build(self) -> Any:
        """Import and build the component, or return the object that the user gave."""
        return self.source.build() if isinstance(self.source, ComponentSpec) else self.source


@dataclass(frozen=True)
class Resolution:
    """What is to be resolved: the request, and what there is to choose from.

    Attributes:
        request: what the user typed.
        registry: the components.
        probe: returns what an accelerator (its spec, or an object) finds on this machine.
        preset: components that the strategy was given when it was made or registered, by kind.
    """

    request: RunRequest
    registry: Registry
    probe: Callable[[Any], Availability]
    preset: Mapping[str, Any] = field(default_factory=dict)

    def find(self, kind: str, name: str, why: str) -> Selection:
        """Return the component of a name; see `Registry.find` for what is raised.

        Where the user named it and another distribution claims that name as well, a warning says
        that core's is taken.
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
        """Return what was asked for, in the request or in the strategy's own arguments.

        Raises:
            ConfigurationError: the two ask for different things.
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


def given(kind: str, component: Any, *, method: str, base: str, name: str = "") -> Selection:
    """Return the selection of an object that the user passed.

    Args:
        kind: "checkpoint_io" and so on.
        component: the object.
        method: an attribute that every such object has.
        base: the class to subclass, for the error.
        name: what the plan calls it; by default the name of its class.

    Raises:
        ConfigurationError: it is no such object, or a class.
    """
    if isinstance(component, type) or not hasattr(component, method):
        raise ConfigurationError(
            f"{kind}={component!r}: expected a name or an instance of {base}"
            + (", received a class: call it" if isinstance(component, type) else "")
        )
    return Selection(kind, name or type(component).__name__, GIVEN, "you passed it", component)


def capabilities_of(strategy: Selection) -> Capabilities:
    """Return what a strategy can do, from its spec or its class."""
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
    """Return what a launcher's spec, or its class, says of it; False where there is none."""
    return launcher is not None and bool(getattr(launcher.source, what, what == "starts_ranks"))


def accepts(accepted: tuple[str, ...] | None, accelerator: Selection) -> bool:
    """Whether a list of accelerator names holds this one, under its name or an alias."""
    if accepted is None:
        return True
    names = {accelerator.name}
    if accelerator.spec is not None:
        names.update(accelerator.spec.aliases)
    return not names.isdisjoint(accepted)


def is_compatible(capabilities: Capabilities, accelerator: Selection) -> bool:
    """Whether a strategy of these capabilities can use an accelerator."""
    if capabilities.accelerators is None:
        return not getattr(accelerator.source, "requires_dedicated_strategies", False)
    return accepts(capabilities.accelerators, accelerator)


def either(names: tuple[str, ...] | None) -> str:
    """Return names as an error lists them."""
    return " or ".join(repr(name) for name in names or ())
