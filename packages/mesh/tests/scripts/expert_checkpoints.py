"""Checkpoints of experts that each strategy writes and reads: `python expert_checkpoints.py OUT`.

Writes the names of weights and of optimizer states whose bits differ after a load, by writer and
reader, and the shapes of weights that the first writer saved.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_models as models
import torch

from stratagem import Lite, seed_everything
from stratagem.strategies import FSDPStrategy
from stratagem_mesh import MeshStrategy
from stratagem_torch.sharding import whole_on_cpu

FORKED: dict[str, Any] = {"launcher": "fork"}


def mesh(expert: int, **options: Any) -> Callable[[], Any]:
    names = ["layers.*.experts"]
    return lambda: MeshStrategy(expert=expert, expert_modules=names, **options, **FORKED)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one process": (1, lambda: "single_device"),
    "fsdp": (2, lambda: FSDPStrategy(**FORKED)),
    "expert 2": (2, mesh(2)),
    "expert 4": (4, mesh(4)),
    "expert 2 x shard 2": (4, mesh(2)),
    "expert 2 x replicate 2": (4, mesh(2, replicate=2)),
}
WRITERS = {
    "one process": "single_file",
    "expert 2": "directory",
    "expert 4": "single_file",
    "expert 2 x shard 2": "directory",
    "expert 2 x replicate 2": "single_file",
}
"""Their formats; each reader saves a single file."""


def lite_of(name: str, form: str) -> Lite:
    ranks, strategy = STRATEGIES[name]
    return Lite(accelerator="cpu", devices=ranks, strategy=strategy(), plugins=form)


def objects(lite: Lite, seed: int) -> tuple[Any, Any]:
    seed_everything(seed)
    made = models.Written()
    return lite.setup(made, torch.optim.AdamW(made.parameters(), lr=0.01))


def write(lite: Lite, path: Path) -> dict[str, Any]:
    """Take two steps, save, and return weights and optimizer state as this strategy has them."""
    model, optimizer = objects(lite, 1)
    for step in range(2):
        lite.backward(models.loss(model, models.batch(4 * step + lite.ranks.data_split[0])))
        optimizer.step()
        optimizer.zero_grad()
    lite.save(path, {"model": model, "optimizer": optimizer})
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = whole_on_cpu(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}, {key}"] = whole_on_cpu(optimizer.state[parameter][key])
    return found


def read(lite: Lite, path: Path, copy: Path) -> None:
    """Load into a model with other weights, and save a copy as a single file."""
    model, optimizer = objects(lite, 2)
    lite.load(path, {"model": model, "optimizer": optimizer})
    lite.save(copy, {"model": model, "optimizer": optimizer})


def contents(path: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=True)
    found = dict(saved["model"])
    for name, state in saved["optimizer"]["state"].items():
        found |= {f"{name}, {key}": value for key, value in state.items()}
    return found


def main(out: str) -> None:
    differing: dict[str, Any] = {}
    copy = Path("copy.ckpt").absolute()
    for writer, form in WRITERS.items():
        path = Path(f"{writer}.ckpt").absolute()
        expected = lite_of(writer, form).launch(write, path)
        differing[writer] = {}
        for reader in STRATEGIES:
            lite_of(reader, "single_file").launch(read, path, copy)
            found = contents(copy)
            copy.unlink()
            differing[writer][reader] = [
                key
                for key, value in expected.items()
                if key not in found or not torch.equal(found[key], value)
            ]
    whole = contents(Path("expert 4.ckpt"))
    plain = models.Written().state_dict()
    shapes = {name: list(whole[name].shape) == list(plain[name].shape) for name in plain}
    Path(out).write_text(json.dumps({"differing": differing, "shapes": shapes}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1])
