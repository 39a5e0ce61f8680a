# Run by test_ddp.py.
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer


def data(samples):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=generator)
    return TensorDataset(torch.arange(samples), inputs, inputs.prod(1, keepdim=True))


def loader(samples=32, batch_size=4, **arguments):
    return DataLoader(data(samples), batch_size=batch_size, **arguments)


def network(norm=False):
    torch.manual_seed(2)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers)


class Net(Module):
    def __init__(self, norm=False):
        super().__init__()
        self.net = network(norm)
        self.seen = []

    def training_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        self.seen += indices.tolist()
        return mse_loss(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        self.log("loss", mse_loss(self.net(inputs), targets))
        self.log("count", len(indices), reduce_fx="sum")
        self.log("largest", indices.max(), reduce_fx="max")
        self.log("smallest", indices.min() + 1, reduce_fx="min")

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def quiet(**arguments):
    defaults = dict(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    return Trainer(**{**defaults, **arguments})
