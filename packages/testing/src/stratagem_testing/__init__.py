"""Conformance kits for authors of plugins, one for each kind of component.

docs/extend/testing-a-plugin.md shows how they are used and what each check means.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem_testing.components.conformance import (
        AcceleratorConformance,
        CallbackConformance,
        CheckpointIOConformance,
        ClusterEnvironmentConformance,
        LauncherConformance,
        LoggerConformance,
        PluginConformance,
        PrecisionConformance,
        ProfilerConformance,
    )
    from stratagem_testing.strategies.conformance import StrategyConformance

__all__ = [
    "AcceleratorConformance",
    "CallbackConformance",
    "CheckpointIOConformance",
    "ClusterEnvironmentConformance",
    "LauncherConformance",
    "LoggerConformance",
    "PluginConformance",
    "PrecisionConformance",
    "ProfilerConformance",
    "StrategyConformance",
]


def __getattr__(name: str) -> Any:
    # `stratagem checkpoint durability` is in here, too, and needs no pytest.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "strategies" if name == "StrategyConformance" else "components"
    return getattr(importlib.import_module(f"{__name__}.{room}.conformance"), name)
