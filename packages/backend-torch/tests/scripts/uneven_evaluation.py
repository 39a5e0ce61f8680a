"""Run by test_fsdp.py: two ranks of fsdp evaluate 11 and then 9 samples in batches of two."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)
        self.log("mean", batch.mean())
        self.log("count", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[float]:
        self.layer(batch)
        found: list[float] = batch.flatten().tolist()
        return found


def main() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", logger=False, enable_progress_bar=False
    )
    found = []
    for samples in (11, 9):
        batches = DataLoader(torch.arange(float(samples)).unsqueeze(1), 2)  # type: ignore[arg-type]
        (metrics,) = trainer.test(Net(), batches)
        found.append([metrics["mean"], metrics["count"], trainer.predict(Net(), batches)])
    Path(f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
