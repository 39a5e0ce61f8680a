"""Checkpoints that each strategy writes and reads: `python mesh_checkpoints.py OUT`.

Writes the names of weights and of optimizer states whose bits differ after a load, by writer and
reader. A writer is a strategy and a format: `"pipeline 2, directory"`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tensor_models import TIED, TOKENS, Language
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stratagem import Lite, seed_everything
from stratagem.checkpoint import consolidate_checkpoint
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
    order = {"example_input": TOKENS} if "pipeline" in options else {}  # the mixer is made last
    return lambda: MeshStrategy(**options, **plan, **region, **order, **FORKED)


def stage_3() -> Any:
    from stratagem_deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=3, **FORKED)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one process": (1, lambda: "single_device"),
    "fsdp": (2, lambda: FSDPStrategy(**FORKED)),
    "tensor 2": (2, mesh(tensor=2)),
    "context 2": (2, mesh(context=2)),
    "shard 2 x tensor 2": (4, mesh(shard=2, tensor=2)),
    "pipeline 2": (2, mesh(pipeline=2)),
    "virtual stages 2": (2, mesh(pipeline=2, virtual_stages=2)),
    "pipeline 2 x shard 2": (4, mesh(pipeline=2, shard=2)),
    "pipeline 2 x tensor 2": (4, mesh(pipeline=2, tensor=2)),
    "pipeline 2 x shard 2 x tensor 2": (8, mesh(pipeline=2, shard=2, tensor=2)),
}
DEEPSPEED = "deepspeed_stage_3"
if find_spec("deepspeed"):
    STRATEGIES[DEEPSPEED] = 2, stage_3


def lite_of(name: str, form: str) -> Lite:
    ranks, strategy = STRATEGIES[name]
    return Lite(accelerator="cpu", devices=ranks, strategy=strategy(), plugins=form)


def objects(lite: Lite, seed: int) -> tuple[Any, Any]:
    seed_everything(seed)
    made = Model()
    return lite.setup(made, torch.optim.AdamW(made.parameters(), lr=0.01))


def write(lite: Lite, path: Path, is_deepspeed: bool) -> dict[str, Any]:
    """Take two steps, save, and return weights and optimizer state as this strategy has them."""
    model, optimizer = objects(lite, 1)
    numbers = torch.Generator().manual_seed(lite.ranks.data_split[0])
    for _ in range(2):
        batches = [torch.randint(0, 16, (2, 12), generator=numbers) for _ in range(2)]
        lite.step(model, batches, lambda own: cross_entropy(model(own).mT, own))
    lite.save(path, {"model": model, "optimizer": optimizer})
    found: dict[str, Any] = {}
    # Under deepspeed, this rank has parts without the names and the shapes of parameters.
    for name, parameter in () if is_deepspeed else model.named_parameters():
        first = "embedding.weight" if name == "head.weight" else name
        found[first] = whole_on_cpu(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{first}, {key}"] = whole_on_cpu(optimizer.state[parameter][key])
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


def consolidated(path: Path) -> Path:
    whole = path.with_suffix(".whole")
    consolidate_checkpoint(path, whole)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--writers", nargs="+", required=True)
    parser.add_argument("--readers", nargs="+", default=list(STRATEGIES))
    chosen = parser.parse_args()
    here = Path.cwd()
    paths = [here / f"{writer}.ckpt" for writer in chosen.writers]
    expected = {}
    for writer, path in zip(chosen.writers, paths, strict=True):
        strategy, _, form = writer.partition(", ")
        is_deepspeed = strategy == DEEPSPEED
        expected[writer] = lite_of(strategy, form).launch(write, path, is_deepspeed)
        if is_deepspeed:
            expected[writer] = contents(path if path.is_file() else consolidated(path))
        names = dict(Model().named_parameters())
        assert all({name, f"{name}, exp_avg"} <= expected[writer].keys() for name in names)
    differing: dict[str, dict[str, list[str]]] = {writer: {} for writer in chosen.writers}
    copies = [here / f"copy {index}.ckpt" for index, _ in enumerate(paths)]
    for reader in chosen.readers:
        lite_of(reader, "single_file").launch(read, paths, copies)
        for writer, copy in zip(chosen.writers, copies, strict=True):
            found = contents(copy)
            copy.unlink()
            differing[writer][reader] = [
                key
                for key, value in expected[writer].items()
                if key not in found
                or not torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value))
            ]
    chosen.out.write_text(json.dumps(differing))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
