"""Importing a plugin module alone, in a new Python: what it costs, brings along and changes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stratagem.testing.processes import clean_environment

HEAVY = (
    *("torch", "numpy", "deepspeed", "jax", "tensorflow", "transformers", "scipy", "pandas"),
    *("lightning", "accelerate", "ray", "torch_xla", "triton"),
)
"""Modules that take long to import, or bring a device's driver along."""

_IMPORT = """
import importlib, io, json, logging, os, signal, sys, threading, time, warnings
import stratagem.discovery
def look():
    return {
        "environment variables": dict(os.environ),
        "sys.path": list(sys.path),
        "signal handlers": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "warnings' filters": [str(each) for each in warnings.filters],
        "handlers of logging": [str(each) for each in logging.getLogger().handlers],
        "the current folder": os.getcwd(),
        "hooks of the interpreter": [str(sys.excepthook), str(sys.displayhook)],
        "what it prints": printed.getvalue(),
    }
printed, stdout = io.StringIO(), sys.stdout
sys.stdout = sys.stderr = printed
before = look()
wall, cpu = time.perf_counter(), time.process_time()
importlib.import_module(sys.argv[1])
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
after = look()
print(json.dumps({
    "seconds": wall,
    "cpu_seconds": cpu,
    "modules": sorted(sys.modules),
    "changed": [name for name in before if before[name] != after[name]],
}), file=stdout)
"""


def import_alone(
    module: str, search_path: Iterable[str] = (), *, folder: Path | None = None
) -> dict[str, Any]:
    """Import a module in a new Python; return what was found, or `error`.

    Args:
        module: its name.
        search_path: folders that are searched before others.
        folder: the current one; None: an empty one.

    Returns:
        `seconds` and `cpu_seconds` of the import, the `modules` that there are afterwards, and
        what is `changed`.
    """
    with tempfile.TemporaryDirectory() as empty:
        finished = subprocess.run(
            [sys.executable, "-c", _IMPORT, module],
            env=clean_environment(search_path),
            cwd=folder or empty,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if finished.returncode != 0:
        return {"error": finished.stderr[-2000:] or f"exit code {finished.returncode}"}
    told: dict[str, Any] = json.loads(finished.stdout)
    return told


def judge_light(module: str, told: Mapping[str, Any], targets: Iterable[object]) -> None:
    """Judge what an import brought along.

    Args:
        module: its name.
        told: what `import_alone` returned.
        targets: those of the plugin's specs.

    Raises:
        AssertionError: names what is heavy, or the module of a component.
    """
    assert "error" not in told, f"{module} cannot be imported: {told['error']}"
    heavy = sorted(set(HEAVY) & set(told["modules"]))
    assert not heavy, (
        f"importing the plugin module {module} imports {', '.join(heavy)} "
        f"({told['seconds']:.1f} s): name classes as 'module:Class' in specs, and leave "
        "imports to their modules"
    )
    for target in targets:
        named = str(target).partition(":")[0]
        assert named == module or named not in told["modules"], (
            f"importing the plugin module {module} imports {named}, the module of a component: "
            "name it in the spec's target only"
        )
