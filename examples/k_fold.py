"""K-fold cross-validation: as many models as folds, each judged by the fold that it has not seen.

    python examples/k_fold.py                               # one process
    python examples/k_fold.py --devices 2                   # two processes, which share each fold
    python examples/k_fold.py --devices 2 --strategy fsdp

A loop around a Trainer is all it takes: every fold has its own model, Trainer and folder of logs.
The data are scikit-learn's digits.
"""

from __future__ import annotations

import argparse
from statistics import fmean, stdev

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from stratagem import Module, Trainer, seed_everything

Batch = tuple[Tensor, Tensor]


class Classifier(Module):
    def __init__(self, width: int = 64, lr: float = 5e-3) -> None:
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
        self.log("val_acc", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"devices": 1, "folds": 5, "epochs": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    # The same on every rank, since every rank runs this script: hence the seed.
    folds = StratifiedKFold(options.folds, shuffle=True, random_state=0).split(images, labels)
    accuracies = []
    for fold, (train, val) in enumerate(folds):
        # Again for each fold, so that folds differ by their data and nothing else.
        seed_everything(1)
        trainer = Trainer(
            strategy=options.strategy,
            devices=options.devices,
            max_epochs=options.epochs,
            enable_progress_bar=False,
        )
        model = Classifier()
        trainer.fit(model, DataLoader(Subset(data, train), batch_size=32, shuffle=True))
        judge = DataLoader(Subset(data, val), batch_size=256)
        accuracies.append(trainer.validate(model, judge, verbose=False)[0]["val_acc"])
        trainer.print(f"fold {fold}: val_acc {accuracies[-1]:.3f}")
    trainer.print(f"val_acc: {fmean(accuracies):.3f} +- {stdev(accuracies):.3f}")


if __name__ == "__main__":
    main()
