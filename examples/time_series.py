"""Forecast a time series: a day ahead, from the three days before.

    python examples/time_series.py                          # one process
    python examples/time_series.py --devices 2              # two processes
    python examples/time_series.py --devices 2 --strategy ddp_sharded

The series is hourly, with a daily and a weekly rhythm, a trend and noise. Two forecasts without
learning are the yardstick: the last value, and the value a day ago.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader, Dataset

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import EarlyStopping, ModelCheckpoint

PAST, AHEAD = 72, 24
Batch = tuple[Tensor, Tensor]


def series(hours: int) -> Tensor:
    time = torch.arange(hours) / 24
    day, week = (2 * math.pi * time).sin(), (2 * math.pi * time / 7).cos()
    return day * (1 + 0.5 * week) + week + 0.01 * time + 0.1 * torch.randn(hours)


class Windows(Dataset[Batch]):
    def __init__(self, values: Tensor) -> None:
        self.windows = values.unfold(0, PAST + AHEAD, 3)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Batch:
        return self.windows[index, :PAST], self.windows[index, PAST:]


class Forecaster(Module):
    def __init__(self, width: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.encoder = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, AHEAD)

    def forward(self, past: Tensor) -> Tensor:
        # Relative to the last value: a trend leads to values that training has never seen.
        last = past[:, -1:]
        _, state = self.encoder((past - last).unsqueeze(2))
        ahead: Tensor = last + self.head(state[-1])
        return ahead

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        past, ahead = batch
        loss = l1_loss(self(past), ahead)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        past, ahead = batch
        self.log("val_mae", l1_loss(self(past), ahead), prog_bar=True)
        self.log("last_value_mae", l1_loss(past[:, -1:].expand_as(ahead), ahead))
        self.log("day_ago_mae", l1_loss(past[:, -AHEAD:], ahead))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        # This schedule waits for a value, which is known after each validation.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_mae"},
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    seed_everything(1)
    values = series(24 * 250)
    # In time: a random split would train on hours around those that it is judged by.
    cut = len(values) * 4 // 5
    train = DataLoader(Windows(values[:cut]), batch_size=64 // options.devices, shuffle=True)
    val = DataLoader(Windows(values[cut:]), batch_size=256)
    best = ModelCheckpoint(monitor="val_mae", filename="{epoch}-{val_mae:.3f}")
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[best, EarlyStopping(monitor="val_mae", patience=4)],
    )
    trainer.fit(Forecaster(), train, val)
    found = trainer.validate(dataloaders=val, ckpt_path="best", verbose=False)[0]
    for name in ("last_value_mae", "day_ago_mae", "val_mae"):
        trainer.print(f"{name}: {found[name]:.3f}")


if __name__ == "__main__":
    main()
