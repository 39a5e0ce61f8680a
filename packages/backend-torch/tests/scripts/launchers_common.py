# Run by test_launchers.py.
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, StrategyRegistry, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.strategies import DDPStrategy


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loader():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=4)


def trainer(strategy, **options):
    options = {"logger": False, "enable_progress_bar": False, "max_epochs": 2, **options}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
