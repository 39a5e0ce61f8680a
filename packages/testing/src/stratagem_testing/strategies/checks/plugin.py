"""The plugin module, which is imported wherever strategies are listed."""

from __future__ import annotations

from typing import Any

from stratagem.discovery import get_registry
from stratagem_testing.author.import_cost import import_alone
from stratagem_testing.processes import clean_environment
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.probe import Probe


@check("plugin/light import")
def _light(probe: Probe) -> dict[str, Any]:
    """The module of the plugin's entry point imports neither torch nor a vendor's library.

    So `stratagem strategies` stays fast. `PluginConformance` checks the rest of a plugin.
    """
    if probe.rank != 0 or probe.target.is_place:
        return {}  # no plugin module: not published
    registry = get_registry()
    candidate = registry.find("strategy", probe.target.strategy)
    modules = [
        report.value.partition(":")[0]
        for report in registry.reports
        if report.distribution == candidate.distribution
    ]
    return {
        "not light": [
            import_alone(module, clean_environment()).why_not_light(module, [candidate.spec.target])
            for module in modules
        ]
    }


@judge_of(_light)
def _judge(found: Result) -> None:
    assert not any(said := found.ranks[0].get("not light", [])), "; ".join(filter(None, said))
