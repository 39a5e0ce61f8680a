"""What importing a plugin module costs, brings along and changes: seen in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HEAVY = (
    *("torch", "numpy", "scipy", "pandas", "jax", "tensorflow", "transformers", "triton"),
    *("deepspeed", "torch_xla", "habana_frameworks", "poptorch", "torchao", "bitsandbytes"),
    *("lightning", "accelerate", "ray", "colossalai", "hivemind", "torchft", "bagua"),
)
"""Modules that take long to import, or bring a device's driver along."""

_TIMEOUT = 120.0
"""Seconds that an import may take."""

_PROGRAM = """
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
before, known, error = look(), set(sys.modules), ""
wall, cpu = time.perf_counter(), time.process_time()
try:
    importlib.import_module(sys.argv[1])
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}".strip()
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
after = look()
print(json.dumps({
    "seconds": wall,
    "cpu_seconds": cpu,
    "modules": sorted(set(sys.modules) - known),
    "changed": [name for name in before if before[name] != after[name]],
    "error": error,
}), file=stdout, flush=True)
os._exit(0)  # a thread that it has started may never end, and what it does at exit is not looked at
"""


@dataclass(frozen=True)
class ImportCost:
    """The cost of an import, beyond the modules that every plugin module imports.

    Attributes:
        seconds, cpu_seconds: wall time and processor time of the import.
        modules: the imported modules.
        changed: changed resources of the process, such as "environment variables".
        error: the reason of a failure; empty after success.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    modules: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    error: str = ""

    def why_not_light(self, module: str, targets: Iterable[object] = ()) -> str:
        """Return why the import is too heavy for every program, or "" for a light import.

        Args:
            module: its name.
            targets: the targets of the plugin's specs; only a component may need their modules.

        Example:
            >>> from stratagem_testing.author.import_cost import ImportCost
            >>> ImportCost(error="KeyError: 'SDK'").why_not_light("mine.plugin")
            "importing mine.plugin alone fails: KeyError: 'SDK'"
        """
        if self.error:
            return f"importing {module} alone fails: {self.error}"
        heavy = [name for name in HEAVY if name in self.modules]
        if heavy:
            return (
                f"{module} takes {self.seconds:.3f} s to import and imports {', '.join(heavy)}, "
                "which every program that uses Stratagem pays: import it in the modules that the "
                "specs' targets name"
            )
        for target in targets:
            named = str(target).partition(":")[0]
            if isinstance(target, str) and named != module and named in self.modules:
                return (
                    f"{module} imports {named}, the module of a component: name it in the spec's "
                    "target only"
                )
        return ""


def import_alone(module: str, environ: Mapping[str, str], folder: str | None = None) -> ImportCost:
    """Import a module in a new interpreter, and return the cost.

    Args:
        module: its name.
        environ: the interpreter's environment variables.
        folder: its current folder; None for an empty folder, so that no file shadows a module.
    """
    # Of another folder, a relative place would be another one.
    places = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(map(os.path.abspath, places))
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, module],
                env={**environ, "PYTHONPATH": path},
                cwd=folder or empty,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ImportCost(seconds=_TIMEOUT, error=f"it takes more than {_TIMEOUT:.0f} s")
    try:
        told: dict[str, Any] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError:  # it has ended the process
        last = done.stderr.strip().rpartition("\n")[2]
        return ImportCost(error=last or f"the process ends with exit code {done.returncode}")
    modules, changed = tuple(told.pop("modules")), tuple(told.pop("changed"))
    return ImportCost(modules=modules, changed=changed, **told)
