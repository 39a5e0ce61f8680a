"""From the start of a script to the first optimizer step of DDP with two processes.

    python benchmarks/launch.py [--rounds 7]

Each way runs a script of its own that imports torch first, and prints when rank 0 has taken its
first step. The ways are interleaved; a figure is the median over rounds of the ratio to torchrun
starting raw DDP in the same round, with quartiles. Lightning takes part where it is installed.
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
from pathlib import Path
from time import time

RAW = """
import torch
import torch.distributed as dist
from time import time
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 32)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("stepped", time(), flush=True)
dist.destroy_process_group()
"""
FRONT_END = """
import torch
from time import time
from {package} import {module}, Trainer

class Net({module}):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 1 and self.global_rank == 0:
            print("stepped", time(), flush=True)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=4)
    Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False{more}).fit(Net(), loader)
"""


def seconds_to_first_step(command: list[str]) -> float:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    stepped = [line for line in done.stdout.splitlines() if line.startswith("stepped ")]
    if done.returncode or not stepped:
        raise SystemExit(f"{command} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return float(stepped[0].split()[1]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    baseline = "torchrun, raw DDP"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = FRONT_END.format(package="stratagem", module="Module", more="")
        (folder / "raw.py").write_text(RAW)
        (folder / "ours.py").write_text(ours)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        script = str(folder / "ours.py")
        ways = {
            baseline: [*torchrun, "--standalone", str(folder / "raw.py")],
            "Trainer(strategy='ddp', devices=2)": [sys.executable, script],
            "stratagem run --devices 2": [
                *[sys.executable, "-m", "stratagem", "run", script, "--devices", "2"]
            ],
        }
        if importlib.util.find_spec("lightning"):
            more = ", enable_model_summary=False"
            peer = FRONT_END.format(package="lightning", module="LightningModule", more=more)
            (folder / "peer.py").write_text(peer)
            ways["Lightning Trainer(strategy='ddp', devices=2)"] = [
                *[sys.executable, str(folder / "peer.py")]
            ]
        for command in ways.values():
            seconds_to_first_step(command)
        measured: list[dict[str, float]] = []
        names = list(ways)
        for _ in range(rounds):
            random.shuffle(names)
            measured.append({way: seconds_to_first_step(ways[way]) for way in names})
    median = statistics.median(m[baseline] for m in measured)
    print(f"{baseline}: {median:.2f} s to the first step\n")
    print("| way | ratio | quartiles |\n|---|---|---|")
    for way in ways:
        if way != baseline:
            low, middle, high = statistics.quantiles([m[way] / m[baseline] for m in measured], n=4)
            print(f"| {way} | {middle:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
