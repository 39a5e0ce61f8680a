"""Checkpoints without the frozen part: `... FOLDER STRATEGY RANKS FORMAT WHAT`.

WHAT is "whole", an uninterrupted run; "first", a run that ends in the middle of an epoch, with a
checkpoint; "second", a run that resumes from it; or "other", one that does so over another base.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import Callback, ModelCheckpoint, TrainedWeightsOnly
from stratagem.errors import CheckpointMismatchError


class Net(Module):
    """A frozen base, a trained head, and buffers that change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 16))
        self.base.requires_grad_(False)
        torch.manual_seed(1)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.norm = nn.BatchNorm1d(16, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.head(self.norm(self.base(batch))).squeeze(1) - batch.sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


def main(folder: Path, strategy: str, ranks: int, form: str, what: str) -> None:
    losses = Losses()
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        plugins=[form],
        max_epochs=2,
        max_steps=5 if what == "first" else -1,
        callbacks=[losses, TrainedWeightsOnly(), *([saver] if what == "first" else [])],
        logger=False,
        enable_checkpointing=what == "first",
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    seed_everything(3)
    net = Net(7 if what == "other" else 0)
    data: Any = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    path = folder / "saved/last.ckpt" if what in ("second", "other") else None
    error = ""
    try:
        seed_everything(3)
        trainer.fit(net, DataLoader(data, 8 // ranks, shuffle=True), ckpt_path=path)
    except CheckpointMismatchError as raised:
        error = str(raised)
    state = trainer.strategy.model_state(trainer.run.require_prepared())
    if trainer.is_global_zero:
        found = {"losses": losses.values, "error": error, "step": trainer.global_step}
        (folder / f"{what}.json").write_text(json.dumps(found))
        if form == "single_file":
            torch.save(dict(state), folder / f"{what}.pt")


if __name__ == "__main__":
    target, name, number, form, what = sys.argv[1:]
    main(Path(target), name, int(number), form, what)
