"""What users may pass for devices and plugins, sorted into a RunRequest's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.precision import Precision

Devices = int | str | list[int] | tuple[int, ...] | None
"""How many (an int; -1: all), which ([1, 4] or "1, 4"), or "auto"."""
Plugin = str | Precision | ClusterEnvironment | CheckpointIO
"""A component, or the name of one."""


def expand_shorthands(
    accelerator: str | Accelerator,
    devices: Devices,
    gpus: int | str | list[int] | None,
    tpu_cores: int | str | list[int] | None,
) -> tuple[str | Accelerator, Devices]:
    """Return accelerator and devices, with `gpus` or `tpu_cores` in their place if given.

    Raises:
        ConfigurationError: both ways were used.
    """
    for shorthand, name, value in (("gpus", "gpu", gpus), ("tpu_cores", "tpu", tpu_cores)):
        if value:  # 0 of them means the CPU, as devices=0 does
            if accelerator not in ("auto", name) or devices not in ("auto", None):
                raise ConfigurationError(
                    f"{shorthand}={value!r} is short for accelerator={name!r} and devices="
                    f"{value!r}; received accelerator={accelerator!r} and devices={devices!r} "
                    "as well: give one or the other"
                )
            accelerator, devices = name, value
    return accelerator, devices


def sort_plugins(
    plugins: Plugin | Sequence[Plugin] | None, precision: str | int | Precision
) -> dict[str, Any]:
    """Return the request's components from a list of plugin objects and names.

    Raises:
        ConfigurationError: one is no component, or one kind was given twice.
    """
    components: dict[str, Any] = {"precision": precision}
    for plugin in as_list(plugins):
        if isinstance(plugin, str):
            registry = get_registry()
            kinds = ("cluster_environment", "checkpoint_io", "precision")
            kind = next(
                (k for k in kinds for c in registry.candidates(k) if _is_called(c.spec, plugin)),
                None,
            )
        elif isinstance(plugin, Precision):
            kind = "precision"
        elif isinstance(plugin, ClusterEnvironment):
            kind = "cluster_environment"
        elif isinstance(plugin, CheckpointIO):
            kind = "checkpoint_io"
        else:
            kind = None
        if kind is None:
            raise ConfigurationError(
                f"plugins has {plugin!r}; expected a CheckpointIO, a ClusterEnvironment or a "
                "Precision, or the name of one (`stratagem doctor` lists them)"
            )
        if kind in components and components[kind] != "32-true":
            raise ConfigurationError(
                f"{kind} was given twice: {components[kind]!r} and {plugin!r}; give it once"
            )
        components[kind] = plugin
    return components


def _is_called(spec: Any, name: str) -> bool:
    return name.casefold() in {n.casefold() for n in (spec.name, *spec.aliases)}


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be None, one thing or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
