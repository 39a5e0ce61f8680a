"""One replica: python replica.py FOLDER NAME REPLICA PEER TIMEOUT.

It writes a line of JSON for each step to FOLDER/NAME.jsonl. After step 3 it waits until the replica
PEER is about to meet it. It ends after the step whose number is in FOLDER/end. A file
FOLDER/NAME.within or FOLDER/NAME.between it takes away, and stops within a step or between two. If
there is a file FOLDER/NAME.fails, its step raises an error, and its process stays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem_torchft.strategy import TorchFTStrategy

SAMPLES, BATCH = 256, 4


class Net(Module):
    def __init__(self, joins: Path) -> None:
        super().__init__()
        self.joins = joins
        self.stops = joins.with_suffix(".within")
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        stop_if_asked(self.stops)
        if self.joins.with_suffix(".fails").exists():
            raise ValueError("planted")
        return mse_loss(self.layers(batch[1]), batch[1].sin())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.joins.touch()  # this is the last thing before replicas meet
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def stop_if_asked(asked: Path) -> None:
    if asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


class Log(Callback):
    def __init__(self, folder: Path, name: str, peer: str) -> None:
        self.file = (folder / f"{name}.jsonl").open("w")
        self.end = folder / "end"
        self.peer = folder / f"{peer}.joins"
        self.stops = folder / f"{name}.between"

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "seen": batch[0].flatten().tolist(),
            "weights": nn.utils.parameters_to_vector(module.parameters()).double().sum().item(),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        while trainer.global_step == 3 and not self.peer.exists():
            time.sleep(0.02)
        stop_if_asked(self.stops)
        trainer.should_stop = self.end.exists() and trainer.global_step >= int(self.end.read_text())


def main() -> None:
    folder, name, replica, peer = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    timeout = float(sys.argv[5])
    seed_everything(replica)  # they begin with different weights
    numbers = torch.arange(float(SAMPLES)).reshape(-1, 1)
    trainer = Trainer(
        strategy=TorchFTStrategy(replica=replica, replicas=2, replica_timeout=timeout),
        accelerator="cpu",
        devices=1,
        max_epochs=1000,
        logger=False,
        callbacks=Log(folder, name, peer),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = TensorDataset(numbers, numbers / SAMPLES)
    try:
        trainer.fit(Net(folder / f"{name}.joins"), DataLoader(data, BATCH, shuffle=True))
    except ValueError as error:
        print(f"failed: {error}", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
