# Run by test_uneven.py.
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from stratagem import Lite, Module, Trainer
from stratagem.strategies import DDPShardedStrategy, DDPStrategy

LENGTHS = (5, 7)


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(count, 4, 5, generator=generator)
    return [(x, x.prod(1, keepdim=True)) for x in inputs]


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("step", 1.0, on_step=True, on_epoch=False, sync_dist=True)
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Net):
    automatic_optimization = False


class Stream(IterableDataset):
    # Yields the batches of this rank; has no length.
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        yield from self.items


class Promises(list):
    # A loader whose length is wrong.
    def __len__(self):
        return 7


def trainer(strategy, devices=2, **arguments):
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": devices,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **arguments,
        }
    )
