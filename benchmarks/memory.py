"""Peak memory of a rank, and the CPU time of a step: ddp and fsdp side by side.

    python benchmarks/memory.py
    python benchmarks/memory.py --rounds 3 --layers 12 --width 1024
    python benchmarks/memory.py --ways ddp deepspeed_stage_2 deepspeed_stage_3 --whole

Two ranks on this machine's CPU train 12 layers of two linear maps (100.7M parameters) with Adam, in
a script as a user writes it: no variable is set, and the model is built in `configure_model`, or
whole in the constructor (`--whole`). The ways take turns, so that what else the machine does meets
all of them alike. Printed are medians of the rounds; of a round, the largest peak of the two ranks
(`ru_maxrss`), and the CPU time of both ranks for a step, user and system, after two steps to warm
up.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = ("ddp", "fsdp", "fsdp_shard_grad_op", "fsdp_no_shard")

SCRIPT = """
import json, resource, sys
from pathlib import Path

import torch
import torch._dynamo  # which the first optimizer imports
from torch import nn

from stratagem import Callback, Module, Trainer

way, layers, width, steps, whole = sys.argv[1], *map(int, sys.argv[2:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = None
        if whole:
            Net.configure_model(self)

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(*(Layer() for _ in range(layers)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Clock(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            self.began = used()


def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime


libraries = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
clock = Clock()
trainer = Trainer(
    accelerator="cpu", strategy=way, devices=2, max_steps=steps + 2, callbacks=clock,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
module = Net()
trainer.fit(module, [torch.randn(16, width) for _ in range(steps + 2)])
figures = {
    "seconds": (used() - clock.began) / steps,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "libraries": libraries,
    "parameters": sum(p.numel() for p in module.parameters()),
}
Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(figures))
"""


def measure(
    way: str, layers: int, width: int, steps: int, *, whole: bool = False
) -> dict[str, float]:
    """Return the figures of one run: MB of the larger rank, and of libraries; seconds of both."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        command = [sys.executable, "script.py", way, *map(str, (layers, width, steps, int(whole)))]
        # One thread a rank: the sum of CPU times is then what is computed, not what waits.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, check=True, env=environment)
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("rank*.json")]
    return {
        "peak": max(rank["peak"] for rank in ranks),
        "libraries": ranks[0]["libraries"],
        "seconds": sum(rank["seconds"] for rank in ranks),
        "parameters": ranks[0]["parameters"],
    }


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--ways", nargs="+", default=WAYS)
    arguments.add_argument("--whole", action="store_true", help="build in the constructor")
    given = arguments.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in given.ways}
    for _ in range(given.rounds):
        for way in given.ways:
            found = measure(way, given.layers, given.width, given.steps, whole=given.whole)
            runs[way].append(found)

    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}, {' '.join(platform.libc_ver())}, {given.rounds} rounds"
    )
    parameters = runs[given.ways[0]][0]["parameters"]
    print(f"{parameters / 1e6:.1f}M parameters, Adam, 2 ranks\n")
    print("| strategy | peak MB a rank | of the first | CPU s a step, both ranks |")
    print("|---|---|---|---|")
    base = statistics.median(run["peak"] for run in runs[given.ways[0]])
    for way, ran in runs.items():
        peak = statistics.median(run["peak"] for run in ran)
        seconds = statistics.median(run["seconds"] for run in ran)
        print(f"| {way} | {peak:.0f} | {peak / base:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
