"""Run every benchmark and print their tables, as BENCHMARKS.md has them.

    python -m nox -s bench
    python benchmarks/run.py

They measure and never fail: a figure is read, with the machine and the date beside it. Let nothing
else run meanwhile.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "A training step": ["step_time.py"],
    "Reading a batch": ["loader_time.py"],
    "Training in two processes": ["ddp_throughput.py"],
    "Importing": ["import_cost.py"],
    "Starting two processes": ["launch.py"],
    "Memory of a rank": ["memory.py"],
}


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def main() -> None:
    names = ("torch", "stratagem-core", "lightning", "accelerate")
    print(f"{datetime.date.today()}, {platform.machine()}, {processor()}, {os.cpu_count()} cores, ")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{n} {version(n)}" for n in names))
    for title, command in PARTS.items():
        print(f"\n## {title}\n", flush=True)
        subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=True)


if __name__ == "__main__":
    main()
