"""Contrastive learning (SimCLR) in which each image is compared with those of every rank.

    python examples/contrastive.py                          # one process
    python examples/contrastive.py --devices 2              # two processes
    python examples/contrastive.py --devices 2 --strategy ddp_sharded

Two views of an image should be close to each other and far from all other images: the more others,
the better. `all_gather` brings those of other ranks, and gradients flow back to them. The data are
scikit-learn's digits, without labels. Validation counts how often a view is closest to its twin.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset, random_split

from stratagem import Module, Trainer, seed_everything

Batch = tuple[Tensor]


def view(images: Tensor) -> Tensor:
    """Hide a third of each image's pixels and add noise: no two views share many pixels."""
    return images * (torch.rand_like(images) > 1 / 3) + 0.1 * torch.randn_like(images)


class SimCLR(Module):
    def __init__(self, width: int = 64, temperature: float = 0.2, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.temperature, self.lr = temperature, lr
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, width))
        # The loss is taken behind this head, which may forget what the encoder should keep.
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, width))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        (images,) = batch
        views = torch.cat([view(images), view(images)])
        own = normalize(self.head(self.encoder(views)), dim=1)
        # (ranks, views, width), with gradients: a rank's loss also moves the others' images.
        everyone = self.all_gather(own, sync_grads=True).flatten(0, 1)
        alike = own @ everyone.T / self.temperature
        me = torch.arange(len(own), device=self.device) + self.global_rank * len(own)
        alike = alike.scatter(1, me[:, None], float("-inf"))  # nobody is compared with itself
        twin = me.roll(len(images))  # the other view lies half of this rank's views further on
        loss = cross_entropy(alike, twin)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = (normalize(self.head(self.encoder(view(batch[0]))), dim=1) for _ in "12")
        found = (first @ second.T).argmax(1) == torch.arange(len(first), device=self.device)
        self.log("twin_acc", found.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    seed_everything(1)
    images, _ = load_digits(return_X_y=True)
    pictures = torch.tensor(images / 16, dtype=torch.float32)
    data = TensorDataset(pictures)
    train, val = random_split(data, [0.7, 0.3], torch.Generator().manual_seed(0))
    # A step has as many images at any number of ranks. `drop_last`: every rank compares as many.
    loader = DataLoader(train, batch_size=256 // options.devices, shuffle=True, drop_last=True)
    judge = DataLoader(val, batch_size=len(val))
    trainer = Trainer(strategy=options.strategy, devices=options.devices, max_epochs=options.epochs)
    model = SimCLR()
    before = trainer.validate(model, judge, verbose=False)[0]["twin_acc"]
    trainer.fit(model, loader, judge)
    loss = float(trainer.callback_metrics["train_loss_epoch"])
    after = trainer.validate(model, judge, verbose=False)[0]["twin_acc"]
    trainer.print(f"train_loss: {loss:.3f} in the last epoch")
    trainer.print(f"twin_acc: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
