"""Runs whose progress is shown: a Module that logs what a test asks for, and its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from stratagem import Module, Trainer


class Logs(Module):
    """Calls a function in training_step, and another in validation_step; trains nothing of note."""

    def __init__(
        self,
        train: Callable[[Logs, Any, int], object] = lambda module, batch, index: None,
        validate: Callable[[Logs, Any, int], object] | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.train_with, self.validate_with = train, validate
        if validate is not None:
            # As an attribute, since a Module that has no such method has no validation.
            self.__dict__["validation_step"] = lambda batch, i: validate(self, batch, i)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.train_with(self, batch, batch_idx)
        return self.weight.sum()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


def numbers(count: int = 10, batch_size: int = 4) -> DataLoader[Any]:
    """0.0, 1.0, ... in batches; with the defaults of 4, 4 and 2."""
    return DataLoader(torch.arange(float(count)), batch_size=batch_size)  # type: ignore[arg-type]


def trainer_with(**arguments: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": True,
            **arguments,
        }
    )
