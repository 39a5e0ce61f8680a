"""One peer: python peer.py FOLDER NAME [PEER].

It meets PEER by the addresses in FOLDER/PEER.addresses, writes its own to FOLDER/NAME.addresses,
and a line of JSON for each batch to FOLDER/NAME.jsonl. It ends when FOLDER/NAME.end is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem_hivemind.strategy import HivemindStrategy


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.1)
        return mse_loss(self.layers(batch[0]), batch[0].sin())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Log(Callback):
    def __init__(self, folder: Path, name: str) -> None:
        self.file = (folder / f"{name}.jsonl").open("w")
        self.end = folder / f"{name}.end"

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        weights = nn.utils.parameters_to_vector(module.parameters()).double().sum().item()
        self.file.write(json.dumps({"step": trainer.global_step, "weights": weights}) + "\n")
        self.file.flush()
        trainer.should_stop = self.end.exists()


def main() -> None:
    folder, name, others = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    seed_everything(len(name))  # peers begin with different weights
    peers = [
        line for other in others for line in (folder / f"{other}.addresses").read_text().split()
    ]
    strategy = HivemindStrategy(
        target_batch_size=32,
        initial_peers=peers,
        matchmaking_time=2.0,
        averaging_timeout=10.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.3},
    )
    (folder / "written").write_text("\n".join(strategy.visible_peers))
    (folder / "written").rename(folder / f"{name}.addresses")
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=10000,
        logger=False,
        callbacks=Log(folder, name),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = TensorDataset(torch.rand(256, 1))
    trainer.fit(Net(), DataLoader(data, 4, shuffle=True))


if __name__ == "__main__":
    main()
