"""Whole runs with a context axis: `python context_training.py RANKS`, which is 1, 2 or 4."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from context_models import WORDS, Encoder, Model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem_mesh import MeshStrategy

# Of dynamo itself, as it traces collectives and inputs.
warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)

STEPS = 12
COMPILED = {"backend": "aot_eager"}


class Net(Module):
    """Predicts the next word; a part of the labels has no loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return cross_entropy(self.net(ids).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(self.trainer.strategy.ranks.all_reduce(loss.detach()).item())
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        self.log("words", float(batch[0].numel()), reduce_fx="sum", on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(shards: int) -> DataLoader[Any]:
    """Batches of 4 over all ranks that read different ones."""
    ids = torch.randint(0, WORDS, (32, 17), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(ids), batch_size=4 // shards)


def run(net: nn.Module, ranks: int, *, compiled: bool = False, **options: Any) -> dict[str, Any]:
    shards = max(1, ranks // (2 * options.get("tensor", 1)))
    strategy: Any = MeshStrategy(context=2, **options) if ranks > 1 else "single_device"
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        compile=COMPILED if compiled else False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Net(net)
    trainer.fit(module, loader(shards), loader(shards))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted: Any = trainer.predict(module, loader(shards))
    return {
        "losses": module.losses,
        "logged": logged,
        "rank": trainer.global_rank,
        "predicted": float(torch.cat(predicted).double().square().sum()),
    }


count = int(sys.argv[1])
checkpointing: dict[str, Any] = {} if count == 1 else {"activation_checkpointing": True}
by_name: dict[str, Any] = {} if count == 1 else {"context_modules": ["net.body"]}
out = {
    "encoder": run(Encoder(causal=True), count),
    "checkpointed": run(Encoder(causal=True), count, **checkpointing),
    "compiled": run(Encoder(causal=True), count, compiled=count == 2),
    "by name": run(Model(), count, **by_name),
    "by name, checkpointed": run(Model(), count, **by_name, **checkpointing),
}
if count == 4:
    layer = "net.encoder.layers.*"
    plan = {f"{layer}.linear1": "colwise", f"{layer}.linear2": "rowwise"}
    out["and replicas"] = run(Encoder(causal=True), count, replicate=2)
    out["and tensor"] = run(Encoder(causal=True), count, tensor=2, tensor_plan=plan)
Path(f"out{out['encoder']['rank']}.json").write_text(json.dumps(out))
