# Run by test_ddp_sharded.py.
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer
from stratagem.strategies import DDPShardedStrategy

inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.prod(1, keepdim=True))


class Net(Module):
    def __init__(self, make=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.make = make
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.make(
            [
                {"params": self.net[0].parameters(), "lr": 0.03},
                {"params": self.net[2].parameters(), "weight_decay": 0.1},
            ],
            lr=0.01,
        )
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


def fit(strategy, devices, epochs, make=torch.optim.AdamW, ckpt_path=None, **arguments):
    net = Net(make)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(net, DataLoader(data, batch_size=8 // devices), ckpt_path=ckpt_path)
    return net, trainer
