"""Stages in turn whose units are sharded by FSDP2 over two ranks: writes out0.json."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))

from pipeline_in_turn import Positions, difference
from pipeline_models import made


# Of FSDP2 about each view that a unit returns, also where no operation writes into it.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def full(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
    }


def run(name: str, virtual: int, policy: MixedPrecisionPolicy, dtype: torch.dtype) -> Any:
    unsharded: list[str] = []

    def shard(model: nn.Module, units: dict[str, nn.Module] | None) -> None:
        for key, unit in (units or {}).items():
            shared = {p for p in unit.parameters() if key in ("embed", "head")}
            fully_shard(unit, mp_policy=policy, ignored_params=shared)
            state = unit._get_fsdp_state()  # type: ignore[operator]
            for group in state._fsdp_param_groups:
                group.unshard = seen(group.unshard, key)

    def seen(unshard: Any, key: str) -> Any:
        def noted(*args: Any) -> Any:
            unsharded.append(key)
            return unshard(*args)

        return noted

    model, step, batch = made(name)
    model = model.to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    loss = step(model, batch)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    positions = Positions(model, 4, virtual=virtual, prepare=shard)
    programs = positions.programs(step, batch)
    assert unsharded == []
    first, of_units = positions.models[0], positions.stages.units
    positions.staged[0].forward(programs[0], 0, {}, lambda: step(first, batch))
    of_stage = {of_units[name] for name in unsharded}
    found, gradients = positions.train(step, batch)
    return {
        "loss": float((found - loss.detach()).abs()),
        "gradients": difference(full(gradients), expected),
        "dtypes": sorted({str(value.dtype) for value in programs[0].values}),
        "unsharded by stage 0": sorted(of_stage),
        "unsharded": len(set(unsharded)),
    }


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    whole = MixedPrecisionPolicy()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    out = {
        "encoder 1": run("encoder", 1, whole, torch.float64),
        "encoder 2": run("encoder", 2, whole, torch.float64),
        "residual": run("residual", 2, whole, torch.float64),
        "parts": run("parts", 2, half, torch.float32),
    }
    Path(f"{folder}/out{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(worker, (str(Path.cwd()),), nprocs=2)
