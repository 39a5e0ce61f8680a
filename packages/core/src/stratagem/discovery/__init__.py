"""Discovery, the light zone: what plugin authors import; neither torch nor an SDK is loaded."""

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.hookspecs import Check, Command, hookimpl
from stratagem.discovery.specs import (
    PLUGIN_API_VERSION,
    AcceleratorSpec,
    Availability,
    CheckpointIOSpec,
    ClusterEnvironmentSpec,
    ComponentSpec,
    LauncherSpec,
    LoggerSpec,
    Objection,
    PrecisionSpec,
    StrategySpec,
    Target,
)

__all__ = [
    "PLUGIN_API_VERSION",
    "AcceleratorSpec",
    "Availability",
    "Capabilities",
    "Check",
    "CheckpointIOSpec",
    "ClusterEnvironmentSpec",
    "Command",
    "ComponentSpec",
    "LauncherSpec",
    "LoggerSpec",
    "Objection",
    "PrecisionSpec",
    "StrategySpec",
    "Target",
    "hookimpl",
]
