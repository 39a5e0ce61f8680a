"""Run by test_state_matrix.py: trains under many strategies, saves, and goes on from others' saves.

python state_matrix.py RANKS save|resume FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_models import Block, Net, loader, trainer
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stratagem.strategies import (
    DDPShardedStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

FORMATS = ("single_file", "directory")
SAVED_AT, STEPS = 10, 14


def divide(model: nn.Module, mesh: Any) -> nn.Module:
    """Divide each block over the tensor-parallel ranks."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def fsdp(name: str, **options: Any) -> Callable[[], FSDPStrategy]:
    return lambda: FSDPStrategy(
        sharding_strategy=name, auto_wrap_policy=ModuleWrapPolicy({Block}), **options
    )


WAYS: dict[int, dict[str, Callable[[], Any]]] = {
    1: {"single_device": lambda: "single_device", "fsdp on 1": fsdp("FULL_SHARD")},
    2: {
        "ddp": lambda: DDPStrategy(find_unused_parameters=True),
        "ddp_sharded": lambda: DDPShardedStrategy(find_unused_parameters=True),
        "fsdp": fsdp("FULL_SHARD"),
        "fsdp SHARD_GRAD_OP": fsdp("SHARD_GRAD_OP"),
        "fsdp NO_SHARD": fsdp("NO_SHARD"),
        "model_parallel": lambda: ModelParallelStrategy(
            parallelize_fn=divide, tensor_parallel_size=2
        ),
    },
    4: {"fsdp HYBRID_SHARD": fsdp("HYBRID_SHARD", device_mesh=(2, 2))},
}
"""Strategies by the number of ranks that they are tried with."""


def fit(way: str, ranks: int, form: str, steps: int, path: Path | None = None) -> tuple[Any, Net]:
    """Train up to so many steps, with accumulation, clipping and a scheduler."""
    parts = 1 if way == "model_parallel" else ranks
    module = Net()
    # Two passes over the data are eight steps, so that a save comes in the middle of the third,
    # and training ends in the fourth.
    runs = trainer(WAYS[ranks][way](), ranks, max_steps=steps, plugins=form)
    runs.fit(module, loader(parts), ckpt_path=path)
    return runs, module


def main(ranks: int, what: str, folder: Path) -> None:
    """Save under every strategy of so many ranks, or resume every save under them."""
    # Sampling anew in another number of ranks is told of elsewhere.
    warnings.simplefilter("ignore")
    losses: dict[str, Any] = {}
    for way in WAYS[ranks]:
        if what == "save":
            _, module = fit(way, ranks, "single_file", STEPS)
            losses[way] = module.losses[2 * SAVED_AT :]
            for form in FORMATS:
                runs, _ = fit(way, ranks, form, SAVED_AT)
                runs.save_checkpoint(folder / f"{way}.{form}")
            continue
        for path in sorted(folder.iterdir()):
            _, module = fit(way, ranks, "single_file", STEPS, path)
            losses[f"{path.name} -> {way}"] = module.losses
    if int(os.environ.get("RANK", 0)) == 0:
        Path(f"{what}-{ranks}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
