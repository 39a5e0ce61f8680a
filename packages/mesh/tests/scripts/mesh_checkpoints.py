"""Checkpoints that each strategy writes and reads: `python mesh_checkpoints.py OUT`.

Writes the names of weights and of optimizer states whose bits differ after a load, by writer and
reader.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tensor_models import TIED, Language
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stratagem import Lite, seed_everything
from stratagem.strategies import FSDPStrategy
from stratagem_mesh import MeshStrategy
from stratagem_torch.sharding import whole_on_cpu

FORKED: dict[str, Any] = {"launcher": "fork"}
PLAN = {**TIED, "mixer": "multihead"}


class Model(Language):
    """Tied layers, attention of its own and torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x) + self.mixer(x, x, x)[0]
        return self.head(x + self.down(self.up(self.norm(x)).relu()))  # type: ignore[no-any-return]


def mesh(**options: Any) -> Callable[[], Any]:
    plan = {"tensor_plan": PLAN} if "tensor" in options else {}
    region = {"context_modules": ["attention"]} if "context" in options else {}
    return lambda: MeshStrategy(**options, **plan, **region, **FORKED)


def stage_3() -> Any:
    from stratagem_deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=3, **FORKED)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one process": (1, lambda: "single_device"),
    "fsdp": (2, lambda: FSDPStrategy(**FORKED)),
    "tensor 2": (2, mesh(tensor=2)),
    "context 2": (2, mesh(context=2)),
    "shard 2 x tensor 2": (4, mesh(shard=2, tensor=2)),
    "pipeline 2 x shard 2": (4, mesh(pipeline=2, shard=2)),
    "pipeline 2 x tensor 2": (4, mesh(pipeline=2, tensor=2)),
}
if find_spec("deepspeed"):
    STRATEGIES["deepspeed_stage_3"] = 2, stage_3
WRITERS = {
    "one process": "single_file",
    "fsdp": "directory",
    "context 2": "directory",
    "shard 2 x tensor 2": "directory",
    "pipeline 2 x shard 2": "directory",
    "pipeline 2 x tensor 2": "single_file",
}
"""Their formats; each reader saves a single file."""


def lite_of(name: str, form: str) -> Lite:
    ranks, strategy = STRATEGIES[name]
    return Lite(accelerator="cpu", devices=ranks, strategy=strategy(), plugins=form)


def objects(lite: Lite, seed: int) -> tuple[Any, Any]:
    seed_everything(seed)
    made = Model()
    return lite.setup(made, torch.optim.AdamW(made.parameters(), lr=0.01))


def write(lite: Lite, path: Path) -> dict[str, Any]:
    """Take two steps, save, and return weights and optimizer state as this strategy has them."""
    model, optimizer = objects(lite, 1)
    numbers = torch.Generator().manual_seed(lite.ranks.data_split[0])
    for _ in range(2):
        tokens = torch.randint(0, 16, (2, 12), generator=numbers)
        lite.step(model, [tokens], lambda own: cross_entropy(model(own).mT, own))
    lite.save(path, {"model": model, "optimizer": optimizer})
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = whole_on_cpu(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}, {key}"] = whole_on_cpu(optimizer.state[parameter][key])
    return {name: t for part in lite.ranks.gather_objects(found) for name, t in part.items()}


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
    differing: dict[str, dict[str, list[str]]] = {}
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
    Path(out).write_text(json.dumps(differing))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1])
