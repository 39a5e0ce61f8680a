"""Distillation: a small network learns from the answers of a large one.

    python examples/distillation.py                         # one process
    python examples/distillation.py --devices 2             # two processes
    python examples/distillation.py --devices 2 --strategy fsdp

The data are scikit-learn's digits, of which the student sees few. Beside their labels it learns the
teacher's probabilities, which say more: that this 3 looks a little like an 8 (Hinton et al., 2015).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader, Subset, TensorDataset

from stratagem import Module, Trainer, seed_everything

Batch = tuple[Tensor, ...]


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


class Classifier(Module):
    def __init__(self, width: int, lr: float = 5e-3) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_acc", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Student(Classifier):
    def __init__(self, width: int, teacher: nn.Module, temperature: float = 4.0) -> None:
        super().__init__(width)
        self.temperature = temperature
        # In a list, so that the teacher is no submodule: the strategy neither wraps nor shards it,
        # and checkpoints of the student stay small.
        self.teacher = [teacher.eval().requires_grad_(False)]

    def on_fit_start(self) -> None:
        self.teacher[0].to(self.device)  # for the same reason, nobody else moves it

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            wanted = (self.teacher[0](images) / self.temperature).softmax(1)
        scores = self(images)
        soft = (scores / self.temperature).log_softmax(1)
        # The square keeps the gradients of both terms alike in size, at any temperature.
        taught = kl_div(soft, wanted, reduction="batchmean") * self.temperature**2
        loss = 0.2 * cross_entropy(scores, labels) + 0.8 * taught
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    seed_everything(1)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).tolist()
    data = digits()
    few = DataLoader(Subset(data, order[:100]), batch_size=20 // options.devices, shuffle=True)
    many = DataLoader(Subset(data, order[:1200]), batch_size=40 // options.devices, shuffle=True)
    val = DataLoader(Subset(data, order[1200:]), batch_size=256)

    def accuracy(model: Module, train: DataLoader[Batch], epochs: int) -> float:
        trainer = Trainer(
            strategy=options.strategy,
            devices=options.devices,
            max_epochs=epochs,
            enable_progress_bar=False,
        )
        trainer.fit(model, train)
        return trainer.validate(model, val, verbose=False)[0]["val_acc"]

    teacher = Classifier(width=256)
    found = {"teacher": accuracy(teacher, many, options.epochs // 3)}
    found["alone"] = accuracy(Classifier(width=24), few, options.epochs)
    student = Student(24, teacher.layers)
    found["student"] = accuracy(student, few, options.epochs)
    if student.global_rank == 0:
        for name, value in found.items():
            print(f"{name}_acc: {value:.3f}")


if __name__ == "__main__":
    main()
