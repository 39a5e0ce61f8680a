"""What importing a plugin module costs, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

HEAVY = (
    *("torch", "numpy", "scipy", "pandas", "jax", "tensorflow", "transformers", "triton"),
    *("deepspeed", "torch_xla", "habana_frameworks", "poptorch", "torchao", "bitsandbytes"),
    *("lightning", "accelerate", "ray", "colossalai", "hivemind", "torchft", "bagua"),
)
"""Modules that take long to import, or bring a device's driver along."""

_TIMEOUT = 120.0
"""Seconds that an import may take."""

_PROGRAM = """
import importlib, json, sys, time
import stratagem.discovery
before = set(sys.modules)
began = time.perf_counter()
importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - began
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


@dataclass(frozen=True)
class ImportCost:
    """What an import brings along, beyond what every plugin module imports.

    Attributes:
        seconds: how long it took.
        heavy: what of `HEAVY` it imports, the slowest to come first in that list.
        error: the end of what was said, where it failed.
    """

    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    error: str = ""


def import_cost(module: str) -> ImportCost:
    """Import a module in a new interpreter, with this one's path, and return what it cost."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ImportCost(seconds=_TIMEOUT, error=f"it takes more than {_TIMEOUT:.0f} s")
    if done.returncode:
        return ImportCost(error=done.stderr.strip().rpartition("\n")[2])
    seconds, modules = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return ImportCost(seconds, tuple(name for name in HEAVY if name in modules))
