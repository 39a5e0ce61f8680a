"""The planned memory of meshes of 4 ranks over the measured one: `python planned_memory.py OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem import Lite, plan_memory
from stratagem_extras.planner.choices import chosen
from stratagem_extras.planner.simulation import Workload, measure_step
from stratagem_extras.planner.training import default_loss, optimizer_maker

MESHES = (
    "mesh(tensor=2)",
    "mesh(context=2)",
    "mesh(tensor=2, context=2)",
    "mesh(pipeline=4)",
    "mesh(pipeline=2, tensor=2)",
    "mesh(pipeline=2, schedule='gpipe')",
)
MICRO_BATCHES = 6


class Net(nn.Module):
    """A model without a plan of layers and without an example of its input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(64, 100)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.zeros(4, 32, 64)


def planned() -> dict[str, int]:
    plan = plan_memory(
        Net, batch, devices=4, strategies=MESHES, accumulate_grad_batches=MICRO_BATCHES
    )
    return {row.name: 0 if row.memory is None else row.memory.total for row in plan.strategies}


def measured() -> dict[str, int]:
    workload = Workload(batch, default_loss, optimizer_maker(None), MICRO_BATCHES)
    found = {}
    for name in MESHES:
        lite = Lite(accelerator="cpu", strategy=chosen(name).spec.build(), devices=4)
        lite.launch()
        phases: dict[str, Any] = measure_step(lite.strategy, workload, Net)
        own = max(memory.total for memory in phases.values())
        found[name] = max(lite.ranks.gather_objects(own))
    return found


if __name__ == "__main__":
    is_rank_zero = "RANK" not in os.environ
    before = planned() if is_rank_zero else {}
    real = measured()
    if is_rank_zero:
        ratios = {name: before[name] / real[name] for name in MESHES}
        Path(sys.argv[1]).write_text(json.dumps(ratios))
