"""A folder of plain weights, read into quantised layers on two ranks: `... STRATEGY MODE`.

Each rank writes whether its tensors equal those of a model that was loaded before it was set up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from stratagem import Lite
from stratagem_cuda.precision import BitsandbytesPrecision


def of_this_rank(model: nn.Module) -> dict[str, Any]:
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def main(strategy: str, mode: str) -> None:
    plugins = BitsandbytesPrecision(mode, ignore_modules={"net.2"})
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    lite.launch()
    torch.manual_seed(lite.global_rank)
    models = [
        nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 3))
        for _ in range(2)
    ]
    models[0].load_state_dict(load_file("in/model.safetensors"))
    before, after = (
        lite.setup(nn.ModuleDict({"net": each.requires_grad_(False)})) for each in models
    )
    wanted = of_this_rank(before)
    found = {"tensors": len(wanted), "differed": False, "equal": True}
    for name, value in of_this_rank(after).items():
        found["differed"] |= not torch.equal(wanted[name], value)
    lite.load_weights(after, "in")
    for name, value in of_this_rank(after).items():
        found["equal"] &= value.dtype == wanted[name].dtype and torch.equal(wanted[name], value)
    Path(f"found{lite.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
