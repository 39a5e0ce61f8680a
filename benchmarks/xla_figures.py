"""What PyTorch/XLA's strategies compute on PJRT's CPU client, beside one device and plain torch.

    python benchmarks/xla_figures.py

In an environment with torch 2.9, torch_xla 2.9 and the two packages (`nox -s xla` makes one). Runs
packages/backend-xla/tests/run_strategy.py under each strategy, a process for each, and prints two
markdown tables: the largest difference of losses, and the graphs that torch_xla compiled (its
metric CompileTime) in two epochs of 70 steps with a validation each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "packages" / "backend-xla" / "tests"
DEVICES = {"single_device": 1, "single_xla": 1, "xla": 4, "xla_fsdp": 4}
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


def run(strategy: str, folder: str) -> dict[str, Any]:
    """Return what the script found under a strategy."""
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES[strategy])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "run_strategy.py"), strategy, folder],
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
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
    with tempfile.TemporaryDirectory() as folder:
        found = {strategy: run(strategy, folder) for strategy in DEVICES}
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
