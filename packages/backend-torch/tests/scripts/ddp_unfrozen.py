# Run by test_ddp.py.
import json
import os
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer

NAME, DEVICES = sys.argv[1], int(sys.argv[2])


class FineTuned(Module):
    """Its first layer is frozen in the first epoch."""

    def __init__(self, automatic=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.first.requires_grad_(False)
        self.automatic_optimization = automatic

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs)))

    def on_train_epoch_start(self):
        self.first.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = mse_loss(self(inputs), targets)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def loader():
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    return DataLoader(data, batch_size=4 // DEVICES)


def by_trainer(model, **arguments):
    trainer = Trainer(
        accelerator="cpu",
        strategy=NAME,
        devices=DEVICES,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(model, loader())
    return sums(model, trainer.ranks)


def by_lite():
    lite = Lite(accelerator="cpu", strategy=NAME, devices=DEVICES)
    lite.launch()
    net = FineTuned()
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.2))
    batches = lite.setup_dataloaders(loader())
    for epoch in range(3):
        net.first.requires_grad_(epoch > 0)
        for inputs, targets in batches:
            optimizer.zero_grad()
            lite.backward(mse_loss(model(inputs), targets))
            optimizer.step()
    # Outside of the strategy, on one rank alone, nothing waits for the others.
    if lite.is_global_zero:
        net(torch.ones(2, 3)).sum().backward()
    return sums(net, lite.ranks)


def sums(model, ranks):
    own = [parameter.sum().item() for parameter in model.parameters()]
    return ranks.gather_objects(own)


results = [
    by_trainer(FineTuned(), accumulate_grad_batches=2),
    by_trainer(FineTuned(automatic=False)),
    by_lite(),
]
if int(os.environ.get("RANK", "0")) == 0:
    print(json.dumps(results))
