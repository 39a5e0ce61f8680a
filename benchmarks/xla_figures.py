"""What PyTorch/XLA's strategies compute on PJRT's CPU client, beside one device and plain torch.

    python benchmarks/xla_figures.py

In an environment with torch 2.9, torch_xla 2.9 and the two packages (`nox -s xla` makes one). Runs
packages/backend-xla/tests/run_strategy.py under each strategy, a process for each, and prints two
markdown tables: the largest difference of losses, and the graphs that torch_xla compiled (its
metric CompileTime) in two epochs of 70 steps with a validation each.

Two processes run at a time, and each says on stderr when it has ended: a minute of CPU time each,
nearly all of it tracing and compiling by torch_xla, so two minutes on two quiet cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "packages" / "backend-xla" / "tests"
DEVICES = {"xla_fsdp": 4, "xla": 4, "single_xla": 1, "single_device": 1}
"""Of each strategy; those that take longest first."""
TIMEOUT = 1800
"""Seconds for one strategy; a machine under much load takes ten times a quiet one's."""
LOSSES = (
    ("an epoch", "losses"),
    ("two batches accumulated, clipped by norm", "accumulated, clipped"),
    ("clipped by value", "clipped by value"),
    ("a last batch of 5", "uneven"),
    ("Lite, by hand", "by hand"),
    ("resumed, single_file", "resumed, single_file"),
    ("resumed, directory", "resumed, directory"),
    ("bf16-mixed", "bf16-mixed", "losses"),
    ("bf16-true", "bf16-true", "losses"),
)


def run(strategy: str, scratch: str) -> dict[str, Any]:
    """Return what the script found under a strategy, in a folder of its own."""
    folder = Path(scratch, strategy)
    folder.mkdir()
    began = time.monotonic()
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES[strategy])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "run_strategy.py"), strategy, str(folder)],
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    print(f"{strategy}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT")[2])
    return found


def apart(one: Any, other: Any) -> str:
    """Return the largest difference of two lists of losses."""
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)):.1e}"


def at(found: Any, keys: Sequence[str]) -> Any:
    """Return what lies under keys in nested mappings."""
    for key in keys:
        found = found[key]
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda strategy: run(strategy, folder), DEVICES)
        found = dict(zip(DEVICES, results, strict=True))
    print("| losses of | xla, 4 devices, over single_xla | xla_fsdp | single_xla over torch |")
    print("|---|---|---|---|")
    for title, *key in LOSSES:
        losses = {name: at(found[name], key) for name in DEVICES}
        pairs = [("xla", "single_xla"), ("xla_fsdp", "single_xla"), ("single_xla", "single_device")]
        cells = [apart(losses[one], losses[other]) for one, other in pairs]
        print(f"| {title} | {' | '.join(cells)} |")
    print("\n| strategy | compiled in step 1 | by step 2 | by step 70 | in both epochs | resumed |")
    print("|---|---|---|---|---|---|")
    for name in ("single_xla", "xla", "xla_fsdp"):
        graphs = found[name]["graphs"]
        steps = [graphs["compiled by step"][index] for index in (0, 1, 69)]
        cells = [*map(str, steps), str(graphs["compiled"])]
        resumed = "bit for bit" if all(found[name]["bit for bit"].values()) else "differs"
        print(f"| {name} | {' | '.join(cells)} | {resumed} |")


if __name__ == "__main__":
    main()
