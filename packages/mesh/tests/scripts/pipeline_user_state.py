"""State that training_step sets under a pipeline: `... OUT RANKS SCHEDULE`.

Writes OUT: the losses, the state, the random numbers of each stage, the warnings, and an error.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy


class Centered(Module):
    """Its loss reads a buffer that the step before has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layers(batch)
        loss = (output - self.center).square().mean()
        with torch.no_grad():
            self.center.mul_(0.5).add_(output.mean(0), alpha=0.5)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(Centered):
    """Sets a buffer by the batch after its layers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layers(batch)
        loss = (output - self.center).square().mean()
        self.center = 0.5 * self.center + batch.mean(0)
        return loss


class ReadScaled(Scaled):
    """The first stage reads the buffer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + self.center, batch_idx)


class Read(Centered):
    """The first stage reads the buffer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + self.center, batch_idx)


class Late(Centered):
    """Sets an attribute from a value that one stage has alone."""

    scale = 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.scale = 0.5 * self.scale + loss.item()
        return loss


class Counts(Centered):
    """Counts its steps."""

    seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += len(batch)
        return super().training_step(batch, batch_idx)


class Samples(Centered):
    """Calls its layers in hooks."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.losses.append(float(self.layers(torch.ones(2, 4)).sum()))
        self.eval()
        self.losses.append(float(self.layers[0](torch.ones(2, 4)).sum()))
        self.train()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 3 == 2:
            with torch.no_grad():
                self.losses.append(float(self.layers(batch).sum()))


class Taught(Centered):
    """Has a teacher in the other stage."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch)
        return (
            super().training_step(batch, batch_idx) + (self.layers(batch) - target).square().sum()
        )


class Noisy(Centered):
    """Draws numbers before and after its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.randn(4)
        self.drawn.append(noise.tolist())
        output = self.layers(batch + noise)
        return (output * torch.rand(4) + noise).square().mean()


def main() -> None:
    path, ranks, schedule = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    found: dict[str, Any] = {}
    virtual = 2 if schedule == "interleaved" else 1
    for kind in (Centered, Scaled, Read, ReadScaled, Late, Counts, Noisy, Samples, Taught):
        torch.set_default_dtype(torch.float64)
        seed_everything(1)
        model = kind()
        strategy: Any = "single_device"
        if ranks > 1:
            strategy = MeshStrategy(pipeline=ranks, schedule=schedule, virtual_stages=virtual)
        trainer = Trainer(
            **{"accelerator": "cpu", "devices": ranks, "max_epochs": 1},
            **{"logger": False, "enable_progress_bar": False, "enable_checkpointing": False},
            strategy=strategy,
            accumulate_grad_batches=3,
        )
        data: Any = torch.randn(24, 4)
        said: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(model, DataLoader(data, 2))
            except StratagemError as error:
                said["error"] = str(error)
        own = [model.center.tolist(), getattr(model, "drawn", [])]
        said["ranks"] = trainer.ranks.gather_objects(own)
        said["losses"] = model.losses
        said["warned"] = [str(one.message) for one in caught if "stages" in str(one.message)]
        found[kind.__name__] = said
    if trainer.is_global_zero:
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
