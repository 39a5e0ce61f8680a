"""Train on digits in two processes with the strategy of a third party; print what came out as JSON.

    python train_local_sgd.py DIGITS FOLDER

`test_third_party.py` runs it where only core's wheel, the plugin's and torch are installed. DIGITS
is a file with the tensors `images` and `labels`; checkpoints go to FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer, seed_everything
from stratagem.strategies import LocalSGDStrategy  # type: ignore[attr-defined]  # once installed

Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """The same parameters on every rank and in every run, but for what the strategy does."""
    seed_everything(1)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def disagreement(front: Trainer | Lite, model: nn.Module) -> float:
    """The largest difference of a parameter between the ranks."""
    of_ranks = front.strategy.ranks.all_gather(flat(model))
    return float((of_ranks - of_ranks[0]).abs().max())


class Classifier(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Disagreements(Callback):
    """How far the ranks are apart after each step."""

    def __init__(self) -> None:
        self.after_step: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after_step.append(disagreement(trainer, module))


def trainer_run(strategy: Any, data: TensorDataset, path: Path | None = None) -> dict[str, Any]:
    """Validate, fit for an epoch, validate again."""
    watch = Disagreements()
    trainer = Trainer(
        strategy=strategy,
        accelerator="laptop",
        devices=2,
        plugins="json_sidecar",
        max_epochs=1,
        logger=False,
        callbacks=watch,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Classifier()
    loader = DataLoader(data, batch_size=32, shuffle=True)
    (before,) = trainer.validate(model, DataLoader(data, batch_size=256), verbose=False)
    trainer.fit(model, loader)
    if path is not None:
        trainer.save_checkpoint(path)
    (after,) = trainer.validate(model, DataLoader(data, batch_size=256), verbose=False)
    return {
        "plan": {what: [choice, provider] for what, choice, provider, _ in trainer.plan.rows()},
        "losses": [before["val_loss"], after["val_loss"]],
        "disagreements": watch.after_step,
        "parameters": flat(model).tolist(),
    }


def lite_run(strategy: Any, data: TensorDataset, path: Path | None = None) -> dict[str, Any]:
    """The same in a hand-written loop."""
    lite = Lite(strategy=strategy, accelerator="laptop", devices=2, plugins="json_sidecar")
    lite.launch()
    model = network()
    model, optimizer = lite.setup(model, sgd(model))
    disagreements, losses = [], []
    for images, labels in lite.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True)):
        loss = cross_entropy(model(images), labels)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(lite.all_reduce(loss)))
        disagreements.append(disagreement(lite, model))
    if path is not None:
        lite.save(path, {"model": model, "optimizer": optimizer, "step": len(losses)})
    return {
        "losses": losses,
        "disagreements": disagreements,
        "disagreement_once_saved": disagreement(lite, model),
        "parameters": flat(model).tolist(),
    }


def main() -> None:
    data, folder = torch.load(sys.argv[1], weights_only=True), Path(sys.argv[2])
    digits = TensorDataset(data["images"], data["labels"])
    rank_zero = Lite(strategy="local_sgd", accelerator="laptop", devices=2)
    rank_zero.launch()
    results = {
        "trainer": trainer_run("local_sgd", digits, folder / "trainer.ckpt"),
        "trainer, every=1": trainer_run(LocalSGDStrategy(every=1), digits),
        "trainer, ddp": trainer_run("ddp", digits),
        "lite": lite_run("local_sgd", digits, folder / "lite.ckpt"),
        "lite, every=1": lite_run(LocalSGDStrategy(every=1), digits),
        "lite, ddp": lite_run("ddp", digits),
    }
    rank_zero.print(json.dumps(results))


if __name__ == "__main__":
    main()
