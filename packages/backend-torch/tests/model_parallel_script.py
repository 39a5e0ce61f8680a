"""Tensor and data parallelism, and hybrid sharding: `python model_parallel_script.py RANKS`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsdp_models import STEPS, Block, Net, Network, data, loader, messages, train, trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

from stratagem import Lite
from stratagem.strategies import FSDPStrategy, ModelParallelStrategy
from stratagem_torch.sharding.deferred import DeferredBuild

ranks = int(sys.argv[1])
shards = ranks // 2
out: dict[str, Any] = {"losses": {}}


def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    for part in model.modules():
        if isinstance(part, Block):
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(part, device_mesh["tensor_parallel"], plan)
    return model


def parallelize_and_shard(model: nn.Module, device_mesh: DeviceMesh) -> None:
    parallelize(model, device_mesh)
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=device_mesh["data_parallel"])


def shard_empty(model: nn.Module, device_mesh: DeviceMesh) -> None:
    for part in model.modules():
        if isinstance(part, Block):
            part.empty = nn.Parameter(torch.zeros(0, 3))
    parallelize_and_shard(model, device_mesh)


def another(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    return nn.Identity()


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("at once", float(len(batch[0])), on_step=True, sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class InConfigureModel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            strategy: Any = self.trainer.strategy
            self.net = parallelize(Network(), strategy.device_mesh)


class OwnDivision(IterableDataset[Any]):
    """Divides itself by rank, as is right under ddp and wrong here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = data(8 * ranks).tensors
        yield from zip(inputs[self.rank :: ranks], targets[self.rank :: ranks], strict=True)


ways: dict[str, Any] = {
    "function": ModelParallelStrategy(parallelize_fn=parallelize, tensor_parallel_size=2),
    "groups": ModelParallelStrategy(
        parallelize_fn=parallelize, data_parallel_size=shards, auto_wrap_policy=Block
    ),
    "own groups": ModelParallelStrategy(
        parallelize_fn=parallelize_and_shard, data_parallel_size=shards, tensor_parallel_size=2
    ),
}
for name, way in ways.items():
    runs, module = train(way, ranks, shards)
    rank = runs.global_rank
    out["losses"][name] = module.losses
    optimizer: Any = module.optimizers()
    weight = next(p for p in optimizer.param_groups[0]["params"] if p.shape == (16, 8))
    out[f"{name} part"] = weight.to_local().numel() / weight.numel()
    runs.save_checkpoint(f"{name}.ckpt")
    resumed = Net(seed=3)
    trainer(way, ranks, max_steps=STEPS + 5).fit(
        resumed, loader(shards), ckpt_path="single_device.ckpt"
    )
    out["losses"][f"{name} resumed"] = resumed.losses
out["data_split"] = runs.strategy.ranks.data_split

module = InConfigureModel()
runs = trainer(ModelParallelStrategy(tensor_parallel_size=2), ranks)
runs.fit(module, loader(shards))
out["losses"]["configure_model"] = module.losses

logs = trainer(ways["function"], ranks, max_steps=-1, max_epochs=1)
logs.fit(Logs(), loader(shards))
out["logged"] = {name: float(value) for name, value in logs.callback_metrics.items()}

if ranks == 4:
    hybrid = FSDPStrategy(
        sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), auto_wrap_policy=Block
    )
    runs, module = train(hybrid, ranks)
    out["losses"]["hybrid"] = module.losses
    optimizer = module.optimizers()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    out["hybrid part"] = sum(p.to_local().numel() for p in held if isinstance(p, DTensor))
    resharding = FSDPStrategy(reshard_after_forward=2, auto_wrap_policy=Block)
    out["losses"]["reshard 2"] = train(resharding, ranks)[1].losses


class OtherOrder(OwnDivision):
    """Has the same samples in each batch on each rank, in another order from the second batch."""

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = data(16).tensors
        order = [0, 1, 2, 3, *((4, 5, 6, 7) if self.rank % 2 else (7, 6, 5, 4))]
        yield from zip(inputs[order], targets[order], strict=True)


def fit_own_division(dataset: type[OwnDivision]) -> None:
    loader = torch.utils.data.DataLoader(dataset(rank), batch_size=4)
    strategy = ModelParallelStrategy(tensor_parallel_size=2, parallelize_fn=parallelize)
    trainer(strategy, ranks).fit(Net(), loader)


out["messages"] = dict(
    messages(
        {
            "another": lambda: trainer(
                ModelParallelStrategy(tensor_parallel_size=2, parallelize_fn=another), ranks
            ).fit(Net(), loader(shards)),
            "batches": lambda: fit_own_division(OwnDivision),
            "order": lambda: fit_own_division(OtherOrder),
            "empty": lambda: trainer(
                ModelParallelStrategy(data_parallel_size=shards, parallelize_fn=shard_empty), ranks
            ).fit(Net(), loader(shards)),
            "nothing": lambda: trainer(ModelParallelStrategy(tensor_parallel_size=2), ranks).fit(
                Net(), loader(shards)
            ),
        }
    )
)

lite = Lite("cpu", strategy=ways["function"], devices=ranks)
lite.launch()
out["drawn"] = [random.random(), float(np.random.rand())]
with lite.init_module():
    net = Network()
model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
batches = lite.setup_dataloaders(loader(shards))
out["losses"]["lite"] = []
for x, y in batches:
    loss = mse_loss(model(x), y)
    lite.backward(loss)
    norm = lite.clip_gradients(model, optimizer, max_norm=0.3)
    optimizer.step()
    optimizer.zero_grad()
    out["losses"]["lite"].append(lite.all_reduce(loss.detach()).item())
# What was put away comes back when it is divided.
torch.manual_seed(6)
with DeferredBuild(lite.strategy.accelerator, lite.device, whole_bytes=0):
    wide = nn.Sequential(Block(64), Block(64))
state = lite.setup(wide).state_dict()
torch.manual_seed(6)
plain = nn.Sequential(Block(64), Block(64)).state_dict()
out["differ"] = [name for name in state if not torch.equal(state[name], plain[name])]
out["names"] = list(state)

with torch.device("meta"):
    on_meta = Network()
strategy: Any = lite.strategy
parallelize(on_meta, strategy.device_mesh)
other = lite.setup(Network())
inputs = {"of a loop": torch.full((2, 8), float(rank)), "other shapes": torch.ones(2 + rank, 8)}
out["messages"].update(
    messages(
        {
            "meta": lambda: lite.setup(on_meta.blocks),
            **{name: partial(other, given) for name, given in inputs.items()},
        }
    )
)
Path(f"out{rank}.json").write_text(json.dumps(out))
