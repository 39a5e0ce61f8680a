"""Trains a small model on the ranks of a Ray cluster; what it tells goes to stdout as JSON.

python train.py OUT [--num-nodes=2] [--devices=1] [--pause=0.2] [--resume=CHECKPOINT] ...
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem_ray import RayLauncher


class Net(Module):
    """Dropout and shuffling: a run that does not resume exactly has other losses."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.fails_at and self.trainer.global_rank == 1:
            raise ValueError("no good on rank 1")
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        torch.manual_seed(2)  # on the rank: a new interpreter begins with any seed
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Tell(Callback):
    """Appends each step's loss to a file of its rank, after a pause in which it can be killed."""

    def __init__(self, out: Path, pause: float) -> None:
        self.out, self.pause = out, pause

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        environment = trainer.strategy.cluster_environment
        self._write(
            trainer,
            pid=os.getpid(),
            host=socket.gethostname(),
            main=environment.main_address,
            restart=environment.restart_count(),
            world_size=trainer.world_size,
            ranks=[trainer.global_rank, trainer.local_rank, trainer.ranks.node_rank],
            argv=sys.argv,
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write(trainer, step=trainer.global_step, loss=float(outputs["loss"]))
        if trainer.global_step == 1:
            print(f"rank {trainer.global_rank} has begun", flush=True)
        time.sleep(self.pause)

    def _write(self, trainer: Trainer, **told: Any) -> None:
        with (self.out / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")


PLUGINS: dict[str, Function[..., str | RayLauncher | None]] = {
    "object": lambda options: RayLauncher(**options),
    "name": lambda options: "ray",
    "none": lambda options: None,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fails-at", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--plugin", choices=["object", "name", "none"], default="object")
    parser.add_argument("--options", type=json.loads, default={})
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        accelerator="cpu",
        # Without Ray, new interpreters too: their random numbers are the same.
        strategy="ddp_spawn" if options.plugin == "none" else "ddp",
        plugins=PLUGINS[options.plugin](options.options),
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=options.steps,
        logger=False,
        callbacks=[
            Tell(options.out, options.pause),
            ModelCheckpoint(options.out / "checkpoints", every_n_train_steps=4, save_top_k=-1),
        ],
        enable_progress_bar=False,
        default_root_dir=options.out,
    )
    net = Net(options.fails_at)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, generator=generator))
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=options.resume)
    weights = torch.cat([parameter.flatten() for parameter in net.parameters()])
    trainer.print(json.dumps({"step": trainer.global_step, "weights": weights.tolist()}))


if __name__ == "__main__":
    main()
