"""A model that logs, its data and a Trainer, for tests of loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from stratagem import Module, Trainer


class Learner(Module):
    """Logs its loss; has hyperparameters."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)
        self.example_input_array = torch.ones(2, 1)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.layer(batch)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).square().mean()
        self.log("loss", loss.detach(), on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01)


def numbers(count: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).unsqueeze(1), batch_size=2)  # type: ignore[arg-type]


def trainer_in(folder: Path, logger: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu", **options}
    return Trainer(default_root_dir=folder, devices=1, logger=logger, **options)


def last_of(trainer: Trainer) -> str:
    saver = trainer.checkpoint_callback
    assert saver is not None
    return saver.best_model_path
