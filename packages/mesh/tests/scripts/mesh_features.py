"""Trains with each feature: `python mesh_features.py FOLDER RANKS AXIS`, a mesh where RANKS is 4.

Each case writes its weights as a checkpoint, and its values into FOLDER/values.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import EMAWeightAveraging
from stratagem_mesh import MeshStrategy

# Of dynamo itself, as it traces collectives.
warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")

FOLDER, RANKS, AXIS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
POLICIES = "activation_checkpointing", "auto_wrap_policy"
READERS = 1 if RANKS == 1 else 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def loader(samples: int, batch: int) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(3)
    data = (
        torch.randn(samples, 6, generator=chance),
        torch.randint(0, 3, (samples,), generator=chance),
    )
    return DataLoader(TensorDataset(*data), batch_size=batch // READERS)


def trainer(strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    axis = {"tensor": 2, "tensor_plan": PLAN} if AXIS == "tensor" else {AXIS: 2}
    mesh = MeshStrategy(**axis, **(strategy or {}))
    return Trainer(
        **{"max_epochs": 2, **options},
        accelerator="cpu",
        devices=RANKS,
        strategy="single_device" if RANKS == 1 else mesh,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "frozen": {},
    "manual": {},
    "checkpointed": {
        "strategy": {"activation_checkpointing": {Block}, "auto_wrap_policy": {Block}}
    },
    "replicas": {"strategy": {"replicate": 2}},
    "compiled": {"compile": {"backend": "aot_eager"}} if RANKS > 1 else {},
    "average": {"callbacks": [EMAWeightAveraging(decay=0.5)]},
}
if AXIS == "pipeline":  # refused
    del CASES["manual"]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    values: dict[str, Any] = {}
    for name, options in CASES.items():
        seed_everything(1)
        model = Manual() if name == "manual" else Net(frozen=name == "frozen")
        own = trainer(**options)
        own.fit(model, loader(64, 8), loader(23, 4))
        own.save_checkpoint(FOLDER / f"{name}.ckpt", weights_only=True)
        values[name] = {key: float(value) for key, value in own.callback_metrics.items()}
    values["predictions"] = predictions(own, model)
    resume(values)
    if own.is_global_zero:
        (FOLDER / "values.json").write_text(json.dumps(values))


def predictions(own: Trainer, model: Net) -> list[int]:
    """Return the predictions of all samples, sorted by rank, which the test sorts back."""
    found: Any = own.predict(model, loader(16, 4))
    parts = own.ranks.gather_objects([batch.tolist() for batch in found])
    readers = own.ranks.by_data_group(parts)
    return [
        sample
        for pair in zip(*(group[0] for group in readers), strict=True)
        for samples in zip(*pair, strict=True)
        for sample in samples
    ]


def resume(values: dict[str, Any]) -> None:
    """Resume within an epoch, and from the file of the other number of ranks, if it is there."""
    seed_everything(1)
    whole = trainer(max_steps=12)
    whole.fit(model := Net(), loader(64, 8))
    whole.save_checkpoint(FOLDER / "whole.ckpt")
    seed_everything(1)
    first = trainer(max_steps=5)
    first.fit(Net(), loader(64, 8))
    first.save_checkpoint(FOLDER / "middle.ckpt")
    second = trainer(max_steps=12)
    second.fit(again := Net(), loader(64, 8), ckpt_path=FOLDER / "middle.ckpt")
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    values["resumed"] = all(bool((local(a) == local(b)).all()) for a, b in pairs)
    other = FOLDER.parent / (sys.argv[4] if RANKS == 1 else "alone") / "middle.ckpt"
    if other.exists():
        third = trainer(max_steps=12)
        third.fit(Net(), loader(64, 8), ckpt_path=other)
        third.save_checkpoint(FOLDER / "from_other.ckpt", weights_only=True)


def local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


if __name__ == "__main__":
    main()
