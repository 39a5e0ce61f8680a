"""What authors of components run against theirs.

The classes need pytest (`pip install stratagem-core[testing]`); docs/testing-a-plugin.md shows how
they are adopted and what each check means.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem_testing.components.conformance import (
        AcceleratorConformance,
        CheckpointIOConformance,
        ClusterEnvironmentConformance,
        LauncherConformance,
        LoggerConformance,
        PluginConformance,
        PrecisionConformance,
    )
    from stratagem_testing.strategies.conformance import StrategyConformance

__all__ = [
    "AcceleratorConformance",
    "CheckpointIOConformance",
    "ClusterEnvironmentConformance",
    "LauncherConformance",
    "LoggerConformance",
    "PluginConformance",
    "PrecisionConformance",
    "StrategyConformance",
]


def __getattr__(name: str) -> Any:
    # `stratagem checkpoint durability` is in here, too, and needs no pytest.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "strategies" if name == "StrategyConformance" else "components"
    return getattr(importlib.import_module(f"{__name__}.{room}.conformance"), name)
