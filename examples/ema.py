"""Validate with an exponential moving average of the weights, which a callback keeps.

    python examples/ema.py                                  # one process (needs stratagem-extras)
    python examples/ema.py --devices 2                      # two processes
    python examples/ema.py --devices 2 --strategy fsdp      # each rank averages its shards

With a high learning rate and noisy labels, weights jump around the best ones. Their average lies
closer. Validation and checkpoints use the average, and training goes on with the weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem.callbacks import EMAWeightAveraging

Batch = tuple[Tensor, Tensor]


def digits(noise: float) -> tuple[TensorDataset, TensorDataset]:
    """Data to train on, in which a part of the labels is drawn at random, and data to judge by."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, cut = (images / 16).float(), 1200
    drawn = torch.where(torch.rand(cut) < noise, torch.randint(10, (cut,)), labels[:cut])
    return TensorDataset(images[:cut], drawn), TensorDataset(images[cut:], labels[cut:])


class Classifier(Module):
    def __init__(self, width: int = 64, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        scores = self.layers(images)
        self.log("val_loss", cross_entropy(scores, labels))
        self.log("val_acc", (scores.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--decay", type=float, default=0.98)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in ("weights", "average"):
        seed_everything(1)
        train, val = digits(noise=0.3)
        # After as many steps as 1 / (1 - decay), the average has mostly forgotten where it began.
        callbacks: list[Callback] = [EMAWeightAveraging(decay=options.decay)]
        trainer = Trainer(
            strategy=options.strategy,
            devices=options.devices,
            max_epochs=options.epochs,
            callbacks=callbacks if name == "average" else None,
            enable_progress_bar=False,
        )
        model = Classifier()
        judge = DataLoader(val, batch_size=256)
        trainer.fit(model, DataLoader(train, batch_size=16 // options.devices, shuffle=True), judge)
        found[name] = trainer.validate(model, judge, verbose=False)[0]
    for name, values in found.items():
        trainer.print(f"{name}: val_loss {values['val_loss']:.3f}, val_acc {values['val_acc']:.3f}")


if __name__ == "__main__":
    main()
