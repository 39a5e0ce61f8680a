"""Trains a small model for some steps, saves it within an epoch, and can go on from there.

The files in `files/` were made with
`python saved_run.py save files/single_file_0.1.0.zip` and
`torchrun --nproc-per-node 2 saved_run.py save files/directory_0.1.0`; each has its next
losses beside it. Every version must resume from them to the same losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem.callbacks import EarlyStopping, ModelCheckpoint

SAVED_AT, STEPS = 7, 12


class Net(Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.25), nn.Linear(width, 1)
        )
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * self.scale
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self) -> Any:
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            (decayed if name.endswith("weight") else plain).append(parameter)
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 0.02}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Losses(Callback):
    """Keeps the losses, and saves once."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(trainer.ranks.all_reduce(outputs["loss"].detach(), "mean")))
        if self.path and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def loader(shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=shuffle)


def train(folder: Path, *, path: str | None = None, ckpt_path: str | Path | None = None) -> Any:
    """Train to step 12, saving at step 7 or going on from there; return the losses."""
    seed_everything(3)
    losses = Losses(path)
    trainer = Trainer(
        accelerator="cpu",
        strategy="fsdp" if torch.distributed.is_torchelastic_launched() else "single_device",
        devices="auto" if torch.distributed.is_torchelastic_launched() else 1,
        plugins="directory" if path and "directory" in path else None,
        max_steps=STEPS,
        callbacks=[losses, EarlyStopping("val_loss"), ModelCheckpoint(folder, save_last=True)],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), loader(True), loader(False), ckpt_path=ckpt_path)
    return trainer, losses.losses


if __name__ == "__main__":
    what, file = sys.argv[1:]
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        if what == "save":
            trainer, losses = train(Path(scratch), path=file)
            if trainer.is_global_zero:
                after = json.dumps(losses[SAVED_AT:])
                Path(file).with_name(Path(file).name + ".losses.json").write_text(after + "\n")
        else:
            trainer, losses = train(Path(scratch), ckpt_path=file)
            if trainer.is_global_zero:
                print(json.dumps(losses))
