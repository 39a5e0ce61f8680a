"""Fits with and without OptimizerInBackward under a strategy: `... OUT NAME RANKS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import OptimizerInBackward, ScheduleFree
from stratagem.errors import StratagemError
from stratagem.strategies import DeepSpeedStrategy, FSDPStrategy, MeshStrategy

STRATEGIES: dict[str, Any] = {
    "single_device": lambda: "single_device",
    "fsdp": lambda: "fsdp",
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    "tensor": lambda: MeshStrategy(
        tensor=2, tensor_plan={"layers.*.0": "colwise", "layers.*.2": "rowwise"}
    ),
    "ddp": lambda: "ddp",
    "deepspeed": lambda: DeepSpeedStrategy(config={"zero_allow_untested_optimizer": True}),
}


class Net(Module):
    def __init__(self, scale: float | list[float] = 1.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(scale))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.words.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.words(batch)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden * self.scale), (batch + 1) % 8)

    def loss_weight(self, batch: Any) -> float:
        return float(batch[0] + 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Held(Callback):
    """Counts the gradients that are there after each backward."""

    most = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self.most = max(self.most, sum(p.grad is not None for p in module.parameters()))


def fit(name: str, ranks: int, folder: Path, *callbacks: Any) -> int:
    held = Held()
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGIES[name](),
        devices=ranks,
        max_steps=5,
        callbacks=[held, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data: Any = torch.randint(0, 8, (40,), generator=torch.Generator().manual_seed(3))
    trainer.fit(
        Net([1.0] if name == "deepspeed" else 1.0),
        DataLoader(data, 8 // (1 if name == "tensor" else ranks)),
    )
    trainer.save_checkpoint(folder)
    return held.most


def main(out: Path, name: str, ranks: int) -> None:
    try:
        whole = fit(name, ranks, out / "whole")
        within = fit(name, ranks, out / "within", OptimizerInBackward())
        (out / f"held{os.environ.get('RANK', '0')}").write_text(f"{whole} {within}")
    except StratagemError as error:
        print(error)
        try:
            fit(name, ranks, out / "within", ScheduleFree())
        except StratagemError as other:
            print(other)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
