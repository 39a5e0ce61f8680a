"""The host time of a step on a mesh, over the same collectives by hand, in turns.

    python benchmarks/mesh_step.py [--steps 200] [--turns 7]

Two ranks over gloo divide the linear layers of a tiny model. By hand: `parallelize_module`,
`fully_shard` over the one rank of the data axis, backward, clipping, and a step of SGD. On the
mesh: `MeshStrategy(tensor=2)` and `Lite.step`. It prints the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stratagem import Lite
from stratagem_mesh import MeshStrategy
from stratagem_torch.sharding import clip_by_norm

STYLES = {0: "colwise", 2: "rowwise"}
PLAN = {f"{block}.{layer}": style for block in range(4) for layer, style in STYLES.items()}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
    return nn.Sequential(*blocks, nn.Tanh())


def loss_of(model: Any, batch: Tensor) -> Any:
    loss = model(batch).square().mean()
    return loss


def by_hand(batch: Tensor) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = build()
    for block in range(4):
        parallelize_module(
            model[block], mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss_of(model, batch).backward()
        clip_by_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_mesh(lite: Lite, batch: Tensor) -> Callable[[], None]:
    model = build()
    prepared, _ = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        lite.step(prepared, [batch], lambda part: loss_of(prepared, part), max_norm=1.0)

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    strategy = MeshStrategy(tensor=2, tensor_plan=PLAN)
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
    lite.launch()
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    ways = by_hand(batch), on_mesh(lite, batch)
    for way in ways:
        timed(way, 20)
    pairs = [tuple(timed(way, options.steps) for way in ways) for _ in range(options.turns)]
    if lite.is_global_zero:
        hand = median(first for first, _ in pairs)
        ratio = median(second / first for first, second in pairs)
        print(f"by hand {hand * 1e6:.0f} us a step; on the mesh {ratio:.2f} times that")


if __name__ == "__main__":
    main()
