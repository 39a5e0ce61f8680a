"""Train a classifier on real data in two processes, through a strategy found by name.

    python -m pip install nox && python -m nox -s demo      # in an environment of its own
    python examples/digits.py                               # where stratagem is installed
    python examples/digits.py --strategy single_device --devices 1

The data are scikit-learn's digits: 1,797 images of 8 x 8 pixels, which ship with the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from stratagem import DataModule, Module, Trainer, seed_everything
from stratagem.callbacks import ModelCheckpoint

Batch = tuple[Tensor, ...]


class Digits(DataModule):
    """The images, four fifths of them to train on."""

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(data, [0.8, 0.2], generator=generator)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, batch_size=64)


class Classifier(Module):
    def __init__(self, width: int = 256, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        scores = self.layers(images)
        self.log("val_loss", cross_entropy(scores, labels))
        self.log("val_acc", (scores.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()

    seed_everything(1)
    best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=best,
        default_root_dir=arguments.folder,
    )
    trainer.print(trainer.plan.explain(), "\n")
    trainer.fit(Classifier(), datamodule=Digits())
    trained = trainer.validate(datamodule=Digits(), ckpt_path="best", verbose=False)[0]

    # Every rank runs this script to its end; what follows needs one of them.
    if not trainer.is_global_zero:
        sys.exit()
    model = Classifier.load_from_checkpoint(best.best_model_path)
    alone = Trainer(strategy="single_device", accelerator="cpu", logger=False)
    again = alone.validate(model, datamodule=Digits(), verbose=False)[0]

    print(f"\n{'best checkpoint':16} {arguments.strategy:>13} {'single_device':>13}")
    for name in trained:
        print(f"{name:16} {trained[name]:13.4f} {again[name]:13.4f}")
    print(f"checkpoint: {best.best_model_path}")
    if abs(trained["val_acc"] - again["val_acc"]) > 1e-6:
        sys.exit("the reloaded model has another accuracy")
    print(f"val_acc={again['val_acc']:.4f}")


if __name__ == "__main__":
    main()
