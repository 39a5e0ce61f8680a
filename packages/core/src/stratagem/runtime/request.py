"""What users may pass for devices and plugins, sorted into a RunRequest's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision

Devices = int | str | list[int] | tuple[int, ...] | None
"""How many (an int; -1: all), which ([1, 4] or "1, 4"), or "auto"."""
Plugin = str | Precision | ClusterEnvironment | CheckpointIO | Launcher
"""A component, or the name of one."""

_CLASSES = {
    "cluster_environment": ClusterEnvironment,
    "checkpoint_io": CheckpointIO,
    "precision": Precision,
    "launcher": Launcher,
}
"""By the request's field; a name that several kinds have means the first."""


def sort_plugins(
    plugins: Plugin | Sequence[Plugin] | None, precision: str | int | Precision
) -> dict[str, Any]:
    """Return the request's components from a list of plugin objects and names.

    Raises:
        ConfigurationError: one is no component, or one kind was given twice.
    """
    components: dict[str, Any] = {"precision": precision}
    for plugin in as_list(plugins):
        kind = _kind_of(plugin)
        if kind is None:
            by_name = isinstance(plugin, str)
            providers = get_registry().possible_providers(plugin) if by_name else []
            problem = (
                f"plugins has {plugin!r}; expected a CheckpointIO, a ClusterEnvironment, a "
                "Launcher or a Precision, or the name of one (`stratagem doctor` lists them)"
            )
            raise ConfigurationError(". ".join((problem, *providers)))
        if kind in components and components[kind] != "32-true":
            raise ConfigurationError(
                f"{kind} was given twice: {components[kind]!r} and {plugin!r}; give it once"
            )
        components[kind] = plugin
    return components


def _kind_of(plugin: Any) -> str | None:
    """Return which field of the request a plugin fills, or None."""
    if isinstance(plugin, str):
        registry = get_registry()
        for kind in _CLASSES:
            if any(_is_called(candidate.spec, plugin) for candidate in registry.candidates(kind)):
                return kind
        return None
    return next((kind for kind, cls in _CLASSES.items() if isinstance(plugin, cls)), None)


def _is_called(spec: Any, name: str) -> bool:
    return name.casefold() in {n.casefold() for n in (spec.name, *spec.aliases)}


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be None, one thing or several, in a sequence of any type."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
