"""The plugin module, which is imported wherever strategies are listed."""

from __future__ import annotations

from typing import Any

from stratagem.discovery.registry import get_registry
from stratagem.testing.light_import import import_alone, judge_light
from stratagem.testing.strategies.check import Found, check, judge_of
from stratagem.testing.strategies.probe import Probe


@check("plugin/light import")
def _light(probe: Probe) -> dict[str, Any]:
    """The module of the entry point imports neither torch nor an SDK.

    `stratagem strategies` is quick whatever is installed; `PluginConformance` has the rest.
    """
    if probe.rank != 0 or probe.target.is_place:
        return {}  # it has no plugin module: it is not published
    registry = get_registry()
    candidate = registry.find("strategy", probe.target.strategy)
    modules = [
        report.value.partition(":")[0]
        for report in registry.reports
        if report.distribution == candidate.distribution
    ]
    return {
        "modules": {module: import_alone(module) for module in modules},
        "target": str(candidate.spec.target),
    }


@judge_of(_light)
def _judge(found: Found) -> None:
    told = found.ranks[0]
    for module, of_module in told.get("modules", {}).items():
        judge_light(module, of_module, [told["target"]])
