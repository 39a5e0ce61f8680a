"""Time of a step under the Trainer over that of a hand-written DeepSpeed loop with the same config.

    python benchmarks/deepspeed_step.py
    python benchmarks/deepspeed_step.py --stages 3 --rounds 7

Two ranks on this machine's CPU train six layers of two linear maps (12.6M parameters) with AdamW.
In one process each, the two ways take turns, on engines of the same config; printed are the medians
of the rounds, and their ratio. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import copy, json, statistics, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from stratagem import Callback, Module, Trainer

stage, rounds, steps, width, layers = map(int, sys.argv[1:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            dist.barrier()
            self.began = time.perf_counter()

    def on_train_end(self, trainer, module):
        dist.barrier()
        self.seconds = (time.perf_counter() - self.began) / steps


batches = [torch.randn(64, width) for _ in range(steps + 2)]
trainers, hand = [], []
for _ in range(rounds):
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", strategy=f"deepspeed_stage_{stage}", devices=2, max_steps=steps + 2,
        callbacks=clock, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    module = Net()
    trainer.fit(module, batches)
    trainers.append(clock.seconds)
    config = copy.deepcopy(trainer.strategy._engines[0].config)
    trainer.strategy.release()

    import deepspeed

    linear = nn.functional.linear
    with trainer.strategy._quiet():
        model = build()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
        )
    for number, batch in enumerate(batches):
        if number == 2:
            dist.barrier()
            began = time.perf_counter()
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
    dist.barrier()
    hand.append((time.perf_counter() - began) / steps)
    nn.functional.linear = linear
    engine.destroy()
if trainer.global_rank == 0:
    medians = [statistics.median(times) for times in (trainers, hand)]
    Path("times.json").write_text(json.dumps(medians))
"""


def measure(stage: int, given: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a step: under the Trainer, and by hand."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        sizes = (stage, given.rounds, given.steps, given.width, given.layers)
        subprocess.run(
            [sys.executable, "-W", "ignore", "script.py", *map(str, sizes)],
            cwd=folder,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        ours, by_hand = json.loads((Path(folder) / "times.json").read_text())
    return ours, by_hand


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--stages", type=int, nargs="+", default=(1, 2, 3))
    given = arguments.parse_args()
    print("| stage | Trainer, ms a step | by hand | ratio |\n|---|---|---|---|")
    for stage in given.stages:
        ours, by_hand = measure(stage, given)
        ratio = ours / by_hand
        print(f"| {stage} | {1000 * ours:.1f} | {1000 * by_hand:.1f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
