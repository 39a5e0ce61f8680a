"""Train on a stream whose samples grow harder, and resume exactly where the stream was.

    python examples/streaming.py                            # one process
    python examples/streaming.py --devices 2                # two processes, each reads its part
    python examples/streaming.py --devices 2 --strategy fsdp

A stream has no index to go back to. This one has a `state_dict` with its position, for checkpoints.
The script trains once in one go, and once in two halves with a checkpoint between them: the weights
are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from stratagem import Module, Trainer, seed_everything

LENGTH = 8
Batch = tuple[Tensor, Tensor]


class Sums(IterableDataset[Batch]):
    """Rows of numbers and their sum; rows get longer as the stream goes on (a curriculum).

    Args:
        count: the number of samples in the stream, of all ranks together.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0  # samples of all ranks before the next one

    def __iter__(self) -> Iterator[Batch]:
        # The ranks take samples in turn. A stream cannot be divided from outside, as an indexed
        # data set is: it has to know its rank, which it learns here, once ranks exist.
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        while self.read + ranks <= self.count:
            sample = self.sample(self.read + rank)
            self.read += ranks  # before `yield`: a checkpoint is saved while this waits there
            yield sample
        self.read = 0

    def sample(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        terms = 1 + number * LENGTH // self.count
        row = torch.randn(LENGTH, generator=generator)
        row[terms:] = 0
        return row, row.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class Adder(Module):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        # Dropout draws random numbers: a resumed run draws those that would have come.
        layers = [nn.Linear(LENGTH, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 1)]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rows, sums = batch
        loss = mse_loss(self.layers(rows).squeeze(1), sums)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        rows, sums = batch
        self.log("val_loss", mse_loss(self.layers(rows).squeeze(1), sums))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    tests: Any = [Sums(1).sample(number) for number in range(10**6, 10**6 + 256)]

    def train(steps: int, checkpoint: Path | None = None) -> tuple[Trainer, Adder]:
        seed_everything(1)
        model = Adder()
        trainer = Trainer(strategy=options.strategy, devices=options.devices, max_steps=steps)
        trainer.fit(
            model, DataLoader(Sums(options.steps * 32), batch_size=32), ckpt_path=checkpoint
        )
        return trainer, model

    trainer, whole = train(options.steps // options.devices)
    after = trainer.validate(whole, DataLoader(tests, batch_size=256), verbose=False)[0]["val_loss"]
    trainer, _ = train(options.steps // options.devices // 2)
    # In the middle of the stream; the next line makes ranks agree on a folder of rank 0's choice.
    folder = trainer.strategy.ranks.broadcast(tempfile.mkdtemp())
    trainer.save_checkpoint(Path(folder) / "half.ckpt")
    trainer, resumed = train(options.steps // options.devices, Path(folder) / "half.ckpt")
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    trainer.print(f"val_loss: {after:.3f}")
    trainer.print(f"resumed exactly: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
