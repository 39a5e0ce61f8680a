"""Training steps that ranks of a pipeline do not share: `python pipeline_of_ranks.py OUT`.

Writes the error of each.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy


class OfFirstRank(Module):
    """Reads a hidden layer on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(4, 4) for _ in range(3))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        loss: Tensor = self.last(hidden + self.other(batch[0])).square().mean()
        if self.trainer.is_global_zero:
            self.log("hidden", hidden.mean())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(out: str) -> None:
    found = {}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MeshStrategy(pipeline=2, pipeline_cuts=["last"], launcher="fork"),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(OfFirstRank(), DataLoader(TensorDataset(torch.rand(8, 4)), batch_size=4))
    except StratagemError as error:
        found["of a rank"] = str(error)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1])
