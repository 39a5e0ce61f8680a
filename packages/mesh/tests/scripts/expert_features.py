"""Trains with each feature: `python expert_features.py FOLDER RANKS`, with experts on 4 ranks.

Each case writes its weights as a checkpoint, and its values into FOLDER/values.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import expert_models as models
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem import Module, Trainer, seed_everything
from stratagem.callbacks import EMAWeightAveraging
from stratagem.loggers import CSVLogger
from stratagem_mesh import ExpertLoad, MeshStrategy
from stratagem_torch.sharding import whole_on_cpu

warnings.filterwarnings("ignore")

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
READERS = 1 if RANKS == 1 else 4


class Net(Module):
    def __init__(self, build: Any = models.Written) -> None:
        super().__init__()
        self.net = build()

    def training_step(self, ids: Tensor) -> Tensor:
        loss = models.loss(self.net, ids)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, ids: Tensor) -> None:
        self.log("val_loss", models.loss(self.net, ids), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, ids: Tensor) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(models.loss(self.net, ids))
        optimizer.step()


class FrozenRouter(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.router.requires_grad_(False)


class FrozenExperts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.layers[0].experts.requires_grad_(False)


class FrozenBefore(Net):
    """Nothing before the first experts has gradients, nor have they."""

    def __init__(self) -> None:
        super().__init__()
        self.net.words.requires_grad_(False)
        self.net.layers[0].requires_grad_(False)


class Foreach(Net):
    """Each parameter is sharded, over one of two meshes."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.experts.norm = torch.nn.Identity()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, foreach=True)


def unbalanced() -> Net:
    return Net(models.Unbalanced)


def loader(samples: int, batch: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    data: Any = torch.randint(1, models.WORDS, (samples, 6), generator=numbers)
    return DataLoader(data, batch_size=batch // READERS)


def trainer(strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    given = {"expert": 2, "expert_modules": ["layers.*.experts"], **(strategy or {})}
    return Trainer(
        **{"max_epochs": 2, "logger": False, **options},
        accelerator="cpu",
        devices=RANKS,
        strategy="single_device" if RANKS == 1 else MeshStrategy(**given),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )


LAYER = {"auto_wrap_policy": {models.Layer}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Net, {}),
    "accumulate": (Net, {"accumulate_grad_batches": 3}),
    "norm": (Net, {"gradient_clip_val": 0.1}),
    "value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Net, {"precision": "bf16-mixed"}),
    "bf16-true": (Net, {"precision": "bf16-true"}),
    "manual": (Manual, {}),
    "frozen router": (FrozenRouter, {}),
    "frozen experts": (FrozenExperts, {}),
    "frozen before": (FrozenBefore, {}),
    "foreach": (Foreach, {}),
    "unbalanced": (unbalanced, {"strategy": {"expert": 4}}),
    "groups": (Net, {"strategy": LAYER}),
    "checkpointed": (Net, {"strategy": {"activation_checkpointing": {models.Layer}, **LAYER}}),
    "checkpointed, unbalanced": (
        unbalanced,
        {"strategy": {"activation_checkpointing": {models.ToOne}, "expert": 4}},
    ),
    "experts checkpointed": (Net, {"strategy": {"activation_checkpointing": {models.Experts}}}),
    "resharded to 2": (Net, {"strategy": {"reshard_after_forward": 2, **LAYER}}),
    "kept": (Net, {"strategy": {"reshard_after_forward": False, **LAYER}}),
    "replicas": (Net, {"strategy": {"replicate": 2}}),
    "compiled": (Net, {"compile": {"backend": "aot_eager"}} if RANKS > 1 else {}),
    "average": (Net, {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    values: dict[str, Any] = {}
    for name in [*filter(CASES.get, sys.argv[3:])] or CASES:
        build, options = CASES[name]
        seed_everything(1)
        own = trainer(**options)
        own.fit(build(), loader(64, 8), loader(23, 4))
        own.save_checkpoint(FOLDER / f"{name}.ckpt", weights_only=True)
        values[name] = {key: float(value) for key, value in own.callback_metrics.items()}
    if not sys.argv[3:] or "more" in sys.argv:
        few = trainer().validate(Net(), loader(2, 4))  # before ranks 2 and 3 have run experts
        values["few"] = few[0]["val_loss"]
        resume(values)
        if RANKS > 1:
            load(values)
    if own.is_global_zero:
        (FOLDER / "values.json").write_text(json.dumps(values))


def load(values: dict[str, Any]) -> None:
    """Log the load of a router whose tokens all go to one expert of four, and of one layer."""
    logger = CSVLogger(FOLDER, name="", version="")
    seed_everything(1)
    own = trainer(
        max_steps=2,
        callbacks=[ExpertLoad()],
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
    )
    own.fit(unbalanced(), loader(64, 8))
    values["logged"] = {k: float(v) for k, v in own.callback_metrics.items() if "load" in k}
    values["load"] = {name: each.tolist() for name, each in own.strategy.expert_load.items()}


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
    values["resumed"] = all(bool((whole_on_cpu(a) == whole_on_cpu(b)).all()) for a, b in pairs)
    other = FOLDER.parent / ("mesh" if RANKS == 1 else "alone") / "middle.ckpt"
    if other.exists():
        third = trainer(max_steps=12)
        third.fit(Net(), loader(64, 8), ckpt_path=other)
        third.save_checkpoint(FOLDER / "from_other.ckpt", weights_only=True)


if __name__ == "__main__":
    main()
