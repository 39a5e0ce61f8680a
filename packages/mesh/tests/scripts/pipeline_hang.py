"""Trains two stages, one of which stops: `python pipeline_hang.py CASE`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything
from stratagem_mesh import MeshStrategy

CASE = sys.argv[1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.is_meta or isinstance(self.inner.weight, torch._subclasses.FakeTensor):
            return y
        self.calls += self.training
        if self.stops and self.calls == 7:  # of the third micro-batch of the second step
            if CASE == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return y


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    seed_everything(1)
    model = Net()
    model.layers[0].stops = True
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MeshStrategy(pipeline=2, timeout=30),
        max_epochs=1,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.randn(16, 4), batch_size=1))
