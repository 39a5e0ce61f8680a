"""What importing Stratagem costs, over a bare interpreter and over `import torch`.

    python benchmarks/import_cost.py [--rounds 15] [--plugins 200]

Every variant is a program of its own; all of them run in every round, in an order that changes. A
program is measured from its start to its last statement, by itself, in milliseconds of CPU time
and of wall time; a figure is the median over rounds of the difference (or ratio) to the baseline of
the same round, with quartiles. The plugins are synthetic distributions, each with one strategy and
a requirement on core. Lightning and Accelerate take part where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE, TORCH = "bare interpreter", "import torch"
LIST = "import stratagem; stratagem.StrategyRegistry.available_strategies()"
USE = """
from stratagem import Lite, Trainer
Trainer(accelerator="cpu", devices=1)
Lite(accelerator="cpu", devices=1)
"""
COMMAND = "import sys; from stratagem.cli import main; sys.argv[1:] = [{!r}]; main()"
PEERS = {
    "lightning": (
        "Lightning: Trainer and Fabric",
        """
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
Trainer(accelerator="cpu", devices=1)
Fabric(accelerator="cpu", devices=1)
""",
    ),
    "accelerate": (
        "Accelerate: Accelerator",
        "from accelerate import Accelerator\nAccelerator(cpu=True)\n",
    ),
}

# At once, so that the interpreter's end is not measured: with torch it takes half a second.
END = """
import os, time
times = f"{{time.process_time()}} {{time.clock_gettime(time.CLOCK_MONOTONIC)}}"
os.write({descriptor}, times.encode())
os._exit(0)
"""

PLUGIN = """
from stratagem.discovery import StrategySpec, hookimpl


@hookimpl
def stratagem_components():
    return [StrategySpec(name="{name}", target="{name}.strategy:Strategy", api_version=1)]
"""
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: 1.0
Summary: A synthetic plugin
Requires-Python: >=3.10
Requires-Dist: stratagem-core<0.2,>=0.1
Description-Content-Type: text/markdown

"""


def install_plugins(folder: Path, count: int) -> None:
    """Write distributions as pip leaves them behind."""
    for number in range(count):
        name = f"plugin_{number}"
        (folder / f"{name}.py").write_text(PLUGIN.format(name=name))
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=name) + "A line of its readme.\n" * 100)
        (info / "entry_points.txt").write_text(f"[stratagem.backends]\n{name} = {name}\n")


def milliseconds(code: str, path: str) -> tuple[float, float]:
    """Run a program; return CPU and wall milliseconds from its start to its last statement."""
    readable, writable = os.pipe()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environ["PYTHONPATH"] = path
    with os.fdopen(readable) as pipe, tempfile.TemporaryDirectory() as folder:
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code + END.format(descriptor=writable)],
            env=environ,
            cwd=folder,  # whatever a Trainer writes
            pass_fds=(writable,),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writable)
        if done.returncode:
            sys.exit(f"this program failed:\n{code}\n{done.stderr}")
        cpu, ended = map(float, pipe.read().split())
    return cpu * 1e3, (ended - began) * 1e3


def summary(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_table(
    rows: list[str],
    rounds: list[dict[str, tuple[float, float]]],
    baseline: str,
    *,
    ratio: bool,
    goals: dict[str, str],
) -> None:
    """Print a markdown table of CPU and wall time over the baseline of the same round."""
    unit = f"times `{baseline}`" if ratio else f"ms above a {baseline}"
    print(f"\n| program | CPU, {unit} | wall, {unit} | goal |\n|---|---|---|---|")
    for name in rows:
        cells = []
        for clock in (0, 1):
            pairs = [(each[name][clock], each[baseline][clock]) for each in rounds]
            over = [mine / its if ratio else mine - its for mine, its in pairs]
            cells.append(summary(over, 2 if ratio else 1))
        print(f"| {name} | {cells[0]} | {cells[1]} | {goals.get(name, '')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plugins", type=int, default=200)
    parser.add_argument("--light", action="store_true", help="leave out what imports torch")
    arguments = parser.parse_args()

    listing = f"and list strategies, {arguments.plugins} plugin distributions"
    light = {
        BARE: ("", False),
        "import stratagem": ("import stratagem", False),
        "and list strategies": (LIST, False),
        listing: (LIST, True),
        **{f"stratagem {name}": (COMMAND.format(name), False) for name in ("strategies", "doctor")},
    }
    heavy = {TORCH: ("import torch", False), "Stratagem: Trainer and Lite": (USE, False)}
    for module, (name, code) in PEERS.items():
        if importlib.util.find_spec(module):
            heavy[name] = (code, False)
    programs = light if arguments.light else {**light, **heavy}

    with tempfile.TemporaryDirectory() as folder:
        install_plugins(Path(folder), arguments.plugins)

        def measure(name: str) -> tuple[float, float]:
            code, with_plugins = programs[name]
            return milliseconds(code, folder if with_plugins else "")

        for name in programs:
            measure(name)  # compiles, and warms the page cache
        rounds = []
        names = list(programs)
        for _ in range(arguments.rounds):
            random.shuffle(names)
            rounds.append({name: measure(name) for name in names})

    print(f"Python {sys.version.partition(' ')[0]}; medians of {arguments.rounds} (quartiles)")
    print_table(
        list(light)[1:],
        rounds,
        BARE,
        ratio=False,
        goals={
            "and list strategies": "under 80",
            listing: "under 250",
            # In all, the interpreter's own start included.
            "stratagem strategies": "under 80",
            "stratagem doctor": "under 80",
        },
    )
    if not arguments.light:
        goals = {"Stratagem: Trainer and Lite": "at most 1.10"}
        print_table(list(heavy)[1:], rounds, TORCH, ratio=True, goals=goals)


if __name__ == "__main__":
    main()
