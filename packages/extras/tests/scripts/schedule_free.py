"""Schedule-free AdamW in a loop and under a strategy, with a resume: `... OUT NAME RANKS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import schedulefree
import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint, ScheduleFree

DATA: Any = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) - batch[:, :2]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        # No warmup and a high rate, so that both points of the weights are far apart.
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.1)


class Values(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics["val_loss"]))


def loop(epochs: int) -> tuple[dict[str, Any], list[float]]:
    model, values = Net(), []
    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        optimizer.train()
        for start in range(0, 32, 8):
            optimizer.zero_grad()
            model.training_step(DATA[start : start + 8], 0).backward()
            optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            values.append(float(model.training_step(DATA, 0)))
    return model.state_dict(), values


def fit(strategy: str, ranks: int, folder: Path, source: Path | None = None) -> list[float]:
    values = Values()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_steps=12,
        callbacks=[
            ScheduleFree(),
            values,
            ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(DATA, 8 // ranks)
    trainer.fit(Net(), loader, loader, ckpt_path=source)
    trainer.save_checkpoint(folder / "end.ckpt")
    return values.values


def main(out: Path, name: str, ranks: int) -> None:
    values = fit(name, ranks, out / "whole")
    later = fit(name, ranks, out / "resumed", out / "whole" / "epoch=0-step=3.ckpt")
    if os.environ.get("RANK", "0") == "0":
        state, expected = loop(3)
        torch.save(
            {"state": state, "loop": expected, "fit": values, "resumed": later}, out / "values.pt"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
