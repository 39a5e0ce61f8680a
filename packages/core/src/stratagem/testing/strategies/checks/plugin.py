"""The plugin module, which is imported wherever strategies are listed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from stratagem.discovery.registry import get_registry
from stratagem.testing.strategies.check import Found, check
from stratagem.testing.strategies.probe import Probe

HEAVY = (
    *("torch", "numpy", "deepspeed", "jax", "tensorflow", "transformers", "scipy", "pandas"),
    *("lightning", "accelerate", "ray", "torch_xla", "triton"),
)
"""Modules that take long to import, or bring a device's driver along."""

_IMPORT = """
import importlib, json, sys, time
began = time.perf_counter()
importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


@check(
    "plugin/light import",
    "the module of the entry point imports neither torch nor an SDK: `stratagem strategies` is "
    "quick whatever is installed",
    lambda found: _judge(found),
)
def _light(probe: Probe) -> dict[str, Any]:
    if probe.rank != 0 or probe.target.is_place:
        return {}  # it has no plugin module: it is not published
    registry = get_registry()
    candidate = registry.find("strategy", probe.target.strategy)
    entries = [
        report.value for report in registry.reports if report.distribution == candidate.distribution
    ]
    told = {}
    for entry in entries:
        module = entry.partition(":")[0]
        finished = subprocess.run(
            [sys.executable, "-c", _IMPORT, module],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        told[module] = (
            json.loads(finished.stdout)
            if finished.returncode == 0
            else {"error": finished.stderr[-2000:]}
        )
    return {"modules": told, "target": candidate.spec.target}


def _judge(found: Found) -> None:
    told = found.ranks[0]
    for name, of_module in told.get("modules", {}).items():
        assert "error" not in of_module, f"{name} cannot be imported: {of_module['error']}"
        heavy = sorted(set(HEAVY) & set(of_module["modules"]))
        assert not heavy, (
            f"importing the plugin module {name} imports {', '.join(heavy)} "
            f"({of_module['seconds']:.1f} s): name classes as 'module:Class' in specs, and leave "
            "imports to their modules"
        )
        target = told["target"].partition(":")[0]
        assert target == name or target not in of_module["modules"], (
            f"importing the plugin module {name} imports {target}, the module of the class: name "
            "it in the spec's target only"
        )
