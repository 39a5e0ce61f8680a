"""Four ranks, two replicas of two stages: `python state_by_owner.py FORMAT KIND`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.discovery import Capabilities
from stratagem.strategies import Axis, ParallelStrategy


class Stages(ParallelStrategy):
    """Two replicas of two stages, which have parameters of other names."""

    capabilities = Capabilities(
        launchers=("script",), one_process=False, many_devices=True, parameters="divided"
    )

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        stages = Axis("stage", 2, batches="same", parameters="divided")
        return Axis("data", world_size // 2), stages


class Net(Module):
    """Two layers, of which a stage has one, and a weight that both have."""

    def __init__(self, stages: Sequence[int] = (0, 1), extra: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (3, 5)
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, sizes[i]) for i in stages})
        for stage in stages:
            nn.init.constant_(self.layers[str(stage)].weight, 1.0 + stage)  # type: ignore[arg-type]
        self.tied = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        if extra and 1 in stages:
            self.layers[extra] = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        seen: Any = self.seen
        seen += 1
        losses = [layer(batch).square().mean() for layer in self.layers.values()]
        return torch.stack(losses).sum() + self.tied.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        layers = [*self.layers.parameters()]
        return AdamW([{"params": layers}, {"params": [self.tied], "lr": 0.1}], lr=0.01)


class Clashing(Net):
    """The stages have different values of one name."""

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.tied += self.trainer.global_rank % 2


class Grouped(Net):
    """The stages have optimizers with different numbers of groups."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        if "1" in self.layers:
            optimizer.add_param_group({"params": []})
        return optimizer


class Renamed(Net):
    """A copy of a stage has a name of its own."""

    def on_train_end(self) -> None:
        if self.trainer.global_rank == 3:
            self.other = nn.Parameter(torch.ones(1))


def fitted(model: Module, strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 4),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        plugins=options.pop("plugins", None),
    )
    trainer.fit(model, DataLoader(torch.ones(12, 2), batch_size=2), **options)
    return trainer


def state_of(trainer: Trainer, model: Module) -> dict[str, Any]:
    """Return the state that a rank has, by the names that a checkpoint gives it."""
    (optimizer,) = trainer.optimizers
    names = {id(p): name for name, p in model.named_parameters()}
    state = {names[id(p)]: entry for p, entry in optimizer.state.items()}
    return {"model": dict(model.state_dict()), "optimizer": state}


def stage_of_rank(kind: type[Net] = Net, **options: Any) -> Net:
    """Return the model of this rank; the rank that starts the others is rank 0."""
    return kind((int(os.environ.get("LOCAL_RANK", "0")) % 2,), **options)


def main(form: str, kind: str) -> None:
    plugins = "directory" if form == "directory" else None
    path = "saved" if form == "directory" else "saved.ckpt"
    kinds = {"clash": Clashing, "groups": Grouped, "renamed": Renamed}
    model = stage_of_rank(kinds.get(kind, Net))
    if kind in ("missing", "unexpected"):
        extra = "spare" if kind == "missing" else ""
        fitted(stage_of_rank(extra=extra), Stages(), plugins=plugins, ckpt_path=path)
    elif kind == "resume":
        trainer = fitted(model, Stages(), plugins=plugins, ckpt_path="of_one.ckpt")
        torch.save(state_of(trainer, model), f"resumed{trainer.global_rank}.pt")
    else:
        trainer = fitted(model, Stages(), plugins=plugins)
        trainer.save_checkpoint(path)
        torch.save(state_of(trainer, model), f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
