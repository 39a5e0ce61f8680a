"""Run by test_callbacks.py: ranks have different values of what callbacks and schedulers monitor.

python monitored_values.py STRATEGY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint


class Net(Module):
    """On rank 0 the logged values fall, on rank 1 they rise, and their mean does not change."""

    def __init__(self, monitor: str, interval: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.monitor, self.interval = monitor, interval

    def value(self) -> float:
        return 10.0 + self.trainer.global_step * (1 if self.trainer.global_rank else -1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("train", self.value())
        return torch.as_tensor(self.layer(batch).square().mean())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.value(), sync_dist=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [
            {"scheduler": scheduler, "monitor": self.monitor, "interval": self.interval}
        ]


def fit(strategy: str, monitor: str, interval: str, callback: Callback | None) -> list[Any]:
    torch.manual_seed(0)
    net = Net(monitor, interval)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=4,
        callbacks=callback,
        logger=False,
        enable_checkpointing=isinstance(callback, ModelCheckpoint),
        enable_progress_bar=False,
    )
    batches = DataLoader(torch.ones(8, 1), 2)  # type: ignore[arg-type]
    trainer.fit(net, batches, batches)
    saver = trainer.checkpoint_callback
    best = [] if saver is None else [saver.best_model_path, float(saver.best_model_score)]
    return [trainer.optimizers[0].param_groups[0]["lr"], trainer.current_epoch, *best]


def main(strategy: str) -> None:
    found: dict[str, Any] = {}
    for monitor in ("train", "val"):
        for interval in ("step", "epoch"):
            found[f"{monitor} by {interval}"] = fit(strategy, monitor, interval, None)
        stops = EarlyStopping(monitor, patience=2, check_on_train_epoch_end=True)
        found[f"{monitor} stops"] = fit(strategy, "val", "epoch", stops)
        saves = ModelCheckpoint(f"{strategy}-{monitor}", monitor=monitor, every_n_train_steps=2)
        found[f"{monitor} saves"] = fit(strategy, "val", "epoch", saves)
    Path(f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
