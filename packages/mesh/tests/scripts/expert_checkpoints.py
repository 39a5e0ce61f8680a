"""Checkpoints of experts that each strategy writes and reads: `python expert_checkpoints.py OUT`.

Writes the names of weights and of optimizer states whose bits differ after a load, by writer and
reader, and the shapes of weights that the first writer saved.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
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


def stage_3() -> Any:
    from stratagem_deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=3, **FORKED)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one process": (1, lambda: "single_device"),
    "fsdp": (2, lambda: FSDPStrategy(**FORKED)),
    "expert 2": (2, mesh(2)),
    "expert 4": (4, mesh(4)),
    "expert 2 x shard 2": (4, mesh(2)),
    "expert 2 x replicate 2": (4, mesh(2, replicate=2)),
    "pipeline 2 x expert 2": (4, mesh(2, pipeline=2)),
}
if find_spec("deepspeed"):
    STRATEGIES["deepspeed_stage_3"] = 2, stage_3
WRITERS = {
    "one process": "single_file",
    "expert 2": "directory",
    "expert 4": "single_file",
    "expert 2 x shard 2": "directory",
    "expert 2 x replicate 2": "single_file",
    "pipeline 2 x expert 2": "directory",
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
        ids = models.batch(4 * step + lite.ranks.data_split[0])
        lite.step(model, [ids], lambda own: models.loss(model, own))
    lite.save(path, {"model": model, "optimizer": optimizer})
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = whole_on_cpu(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}, {key}"] = whole_on_cpu(optimizer.state[parameter][key])
    return {name: t for part in lite.ranks.gather_objects(found) for name, t in part.items()}


def read(lite: Lite, paths: list[Path], copies: list[Path]) -> None:
    """Load each into a model with other weights, and save a copy as a single file."""
    model, optimizer = objects(lite, 2)
    for path, copy in zip(paths, copies, strict=True):
        lite.load(path, {"model": model, "optimizer": optimizer})
        lite.save(copy, {"model": model, "optimizer": optimizer})


def contents(path: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=True)
    found = dict(saved["model"])
    for name, state in saved["optimizer"]["state"].items():
        found |= {f"{name}, {key}": value for key, value in state.items()}
    return found


def main(out: str) -> None:
    here = Path.cwd()
    paths = [here / f"{writer}.ckpt" for writer in WRITERS]
    copies = [here / f"copy {index}.ckpt" for index, _ in enumerate(paths)]
    expected = {
        writer: lite_of(writer, form).launch(write, path)
        for (writer, form), path in zip(WRITERS.items(), paths, strict=True)
    }
    differing: dict[str, Any] = {writer: {} for writer in WRITERS}
    for reader in STRATEGIES:
        lite_of(reader, "single_file").launch(read, paths, copies)
        for writer, copy in zip(WRITERS, copies, strict=True):
            found = contents(copy)
            copy.unlink()
            differing[writer][reader] = [
                key
                for key, value in expected[writer].items()
                if key not in found or not torch.equal(found[key], value)
            ]
    whole = contents(Path("expert 4.ckpt"))
    plain = models.Written().state_dict()
    shapes = {name: list(whole[name].shape) == list(plain[name].shape) for name in plain}
    Path(out).write_text(json.dumps({"differing": differing, "shapes": shapes}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1])
