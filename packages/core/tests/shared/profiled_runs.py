"""A model, its data and a Trainer, for tests of profilers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Module, Trainer


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.trainer.profiler.profile("my own"):
            return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def on_train_start(self) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(12, 2), 2)  # type: ignore[arg-type]


def trainer(profiler: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler=profiler,
        **options,
    )
