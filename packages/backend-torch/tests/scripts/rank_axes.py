"""Four ranks in a mesh of two axes: `python rank_axes.py KIND`, with a kind of `main`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loss_weights import IGNORED, Net, batches, fit, flat, in_pairs, reference
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stratagem import Lite
from stratagem.discovery import Capabilities
from stratagem.strategies import (
    Axis,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)

RANKS = 4


class Drifts(Net):
    """A model whose norm, which is not divided over tensor ranks, differs on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.words(tokens.flatten()).tanh())).clone()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.trainer.global_rank == 3:
            bias: Any = self.norm.bias
            with torch.no_grad():
                bias.to_local().add_(1)


class Stages(ParallelStrategy):
    """Two replicas of two stages, which have parameters of the same names."""

    capabilities = Capabilities(
        launchers=("script",), one_process=False, many_devices=True, parameters="divided"
    )

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        stages = Axis("stage", 2, batches="same", parameters="divided")
        return Axis("data", world_size // 2), stages


class OfStage(Net):
    """The parameters of a stage, of which one drifts."""

    def __init__(self, drifts: int | None) -> None:
        super().__init__()
        self.drifts = drifts

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.head.weight.fill_(self.trainer.global_rank % 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == self.drifts:
            with torch.no_grad():
                self.head.bias += 1


class InContext(DDPStrategy):
    """Two ranks read each batch, and each computes the values of half of its tokens."""

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        return Axis("data", world_size // 2), Axis("context", 2, batches="parts")


class Halves(Net):
    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ranks = self.trainer.ranks
        _, half = ranks.coordinates(ranks.global_rank)
        tokens, labels = (each.chunk(2, dim=1)[half] for each in batch)
        return tokens, labels

    def loss_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss_weight(self.part(batch))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = self.part(batch)
        valid = int((labels != IGNORED).sum())
        loss = cross_entropy(self(tokens), labels.flatten(), ignore_index=IGNORED)
        self.log("tokens", float(valid), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("now", float(valid), on_step=True, sync_dist=True, reduce_fx="sum")
        return loss


def main(kind: str) -> None:
    mesh = ModelParallelStrategy(tensor_parallel_size=2, parallelize_fn=in_pairs, timeout=8)
    if kind == "drift":
        fit(Drifts(), mesh, RANKS, detect_divergence=1)
    elif kind == "hybrid":
        hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
        fit(Drifts(), hybrid, RANKS, detect_divergence=1)
    elif kind == "stages":
        fit(OfStage(None), Stages(), RANKS, detect_divergence=1)
        print("STAGES MAY DIFFER", flush=True)
        fit(OfStage(2), Stages(), RANKS, detect_divergence=1)
    elif kind == "context":
        trainer = fit(Halves(), InContext(), RANKS, gradient_clip_val=0.3)
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        weights = flat(trainer.model.state_dict())
        counts = [int((labels != IGNORED).sum()) for _, labels in batches()]
        found |= {"weights": weights, "reference": reference(2, 1)}
        found |= {"of epoch": sum(counts), "of step": sum(counts[-2:])}
        Path("found.json").write_text(json.dumps(found))
    else:
        lite = Lite(accelerator="cpu", devices=RANKS, strategy=mesh)
        lite.launch()
        if kind == "fails" and lite.global_rank == 1:
            raise ValueError("of one rank")
        if kind == "hangs" and lite.global_rank in (0, 2):
            time.sleep(60)
        lite.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
