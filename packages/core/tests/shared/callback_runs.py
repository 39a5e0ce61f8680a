"""A model, its data and a Trainer, for tests of callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
            self.head = nn.Linear(4, 1)
        self.validated_with: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.head(self.backbone(batch[0])) - batch[1]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated_with.append(float(self.head.weight.sum()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[1]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader(shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=shuffle)


def trainer(*callbacks: Callback, logger: Any = False, **options: Any) -> Trainer:
    options.setdefault(
        "enable_checkpointing", any(isinstance(one, ModelCheckpoint) for one in callbacks)
    )
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
