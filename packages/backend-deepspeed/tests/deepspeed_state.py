"""Run by test_state.py: saves under ZeRO's stages and others, and goes on from every save.

python deepspeed_state.py RANKS save|resume|more FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed_models import Net, Network, data, loader, trainer
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader

from stratagem import Lite, Module, seed_everything
from stratagem.errors import CheckpointMismatchError
from stratagem_deepspeed.strategy import DeepSpeedStrategy

SAVED_AT, STEPS = 10, 20
MATRIX_STEPS = 14


def zero(**options: Any) -> Callable[[], DeepSpeedStrategy]:
    return lambda: DeepSpeedStrategy(**options)


OFFLOAD = {
    "offload_optimizer": True,
    "offload_parameters": True,
    "config": {"zero_force_ds_cpu_optimizer": False},  # torch's, which needs no op
}
WAYS: dict[int, dict[str, Callable[[], Any]]] = {
    1: {"ddp": lambda: "ddp", "stage 2": zero(stage=2), "stage 3": zero(stage=3)},
    2: {
        "ddp": lambda: "ddp",
        "fsdp": lambda: "fsdp",
        "stage 1": zero(stage=1),
        "stage 2": zero(stage=2),
        "stage 3": zero(stage=3),
        "stage 3 in small groups": zero(stage=3, sub_group_size=100),
        "stage 3 offload": zero(stage=3, **OFFLOAD),
    },
}


def fit(way: str, ranks: int, steps: int, path: Path | None = None, **options: Any) -> Any:
    """Train up to so many steps."""
    module = Net()
    runs = trainer(WAYS[ranks][way](), ranks, max_steps=steps, **options)
    runs.fit(module, loader(ranks), ckpt_path=path)
    return runs, module


def save(ranks: int, folder: Path) -> dict[str, Any]:
    """Save under each strategy; return what it loses in the steps after."""
    losses = {}
    for way in WAYS[ranks]:
        losses[f"{way} on {ranks}"] = fit(way, ranks, MATRIX_STEPS)[1].losses[SAVED_AT:]
        both = way in ("ddp", "stage 2", "stage 3") and ranks == 2
        for form in ("single_file", "directory") if both else ("directory",):
            runs, _ = fit(way, ranks, SAVED_AT, plugins=form)
            runs.save_checkpoint(folder / f"{way} on {ranks}.{form}")
    return losses


def resume(ranks: int, folder: Path) -> dict[str, Any]:
    """Go on from every save under each strategy; return the losses."""
    return {
        f"{path.name} -> {way} on {ranks}": fit(way, ranks, MATRIX_STEPS, path)[1].losses
        for way in WAYS[ranks]
        for path in sorted(folder.iterdir())
    }


def more(ranks: int, folder: Path) -> dict[str, Any]:
    """What the matrix does not show: bfloat16, Lite, evaluation, a second load, what is refused."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        WAYS[ranks]["bf16"] = zero(stage=stage)
        bf16: dict[str, Any] = {"precision": "bf16-mixed"}
        path = folder / f"bf16 {stage}"
        runs, _ = fit("bf16", ranks, SAVED_AT, **bf16)
        runs.save_checkpoint(path)
        out[f"bf16 {stage}"] = {
            "whole": fit("bf16", ranks, STEPS, **bf16)[1].losses[SAVED_AT:],
            "resumed": fit("bf16", ranks, STEPS, path, **bf16)[1].losses,
        }
    for stage in (2, 3):
        out[f"middle {stage}"] = middle_of_an_epoch(ranks, stage, folder)
        out[f"scheduler {stage}"] = configs_scheduler(ranks, stage, folder)
        out[f"groups {stage}"] = groups_that_count_apart(ranks, stage, folder)
    out["lite"] = lite_losses(ranks, folder / "lite")
    return out


class Random(Net):
    """With dropout, and numbers of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return super().training_step((dropout(inputs, 0.3), targets), batch_idx)


def middle_of_an_epoch(ranks: int, stage: int, folder: Path) -> dict[str, Any]:
    """Resume after 5 of 8 shuffled batches: the losses, and the largest difference of weights."""
    path = folder / f"middle {stage}"

    def run(steps: int, ckpt_path: Path | None = None) -> Any:
        seed_everything(11)
        module = Random()
        runs = trainer(zero(stage=stage)(), ranks, max_steps=steps)
        runs.fit(module, DataLoader(data(), 8 // ranks, shuffle=True), ckpt_path=ckpt_path)
        return runs, module

    interrupted, _ = run(5)
    interrupted.save_checkpoint(path)
    end, whole = run(12)
    end.save_checkpoint(folder / f"middle {stage} whole")
    end, resumed = run(12, path)
    end.save_checkpoint(folder / f"middle {stage} resumed")
    return {"whole": whole.losses[5:], "resumed": resumed.losses}


SCHEDULED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 15, "warmup_type": "linear"},
    },
}


class Configured(Net):
    """Its optimizer and scheduler are the config's."""

    configure_optimizers = Module.configure_optimizers


def configs_scheduler(ranks: int, stage: int, folder: Path) -> dict[str, Any]:
    """Resume in the middle of the warm-up that a config's scheduler does."""
    path = folder / f"scheduler {stage}"

    def run(steps: int, ckpt_path: Path | None = None) -> Any:
        module = Configured()
        runs = trainer(zero(stage=stage, config=SCHEDULED)(), ranks, max_steps=steps)
        runs.fit(module, loader(ranks), ckpt_path=ckpt_path)
        return runs, module.losses

    run(SAVED_AT)[0].save_checkpoint(path)
    return {"whole": run(STEPS)[1][SAVED_AT:], "resumed": run(STEPS, path)[1]}


def nadam(module: Net) -> torch.optim.Optimizer:
    """Two groups with betas of their own, so that their numbers differ as training goes on."""
    weights = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": weights[::2]},
        {"params": weights[1::2], "betas": (0.5, 0.9)},
    ]
    return torch.optim.NAdam(groups, lr=0.01)


def one_group(module: Net) -> torch.optim.Optimizer:
    """The first of the two groups, without the other's parameters."""
    first, second = nadam(module).param_groups
    for parameter in second["params"]:
        parameter.requires_grad_(False)
    return torch.optim.NAdam([first])


def groups_that_count_apart(ranks: int, stage: int, folder: Path) -> dict[str, Any]:
    """Resume an optimizer that keeps a number for each group."""
    path = folder / f"groups {stage}"

    def run(steps: int, ckpt_path: Path | None = None, optimizer: Any = nadam) -> Any:
        module = Net(optimizer=optimizer)
        runs = trainer(zero(stage=stage)(), ranks, max_steps=steps)
        runs.fit(module, loader(ranks), ckpt_path=ckpt_path)
        return runs, module.losses

    run(SAVED_AT)[0].save_checkpoint(path)
    refused = ""
    try:
        run(STEPS, path, one_group)
    except CheckpointMismatchError as error:
        refused = str(error)
    return {
        "whole": run(STEPS)[1][SAVED_AT:],
        "resumed": run(STEPS, path)[1],
        "with one group": refused,
    }


def lite_losses(ranks: int, path: Path) -> dict[str, Any]:
    """A hand-written loop, saved and loaded back into the same objects: the same losses again."""
    lite = Lite(accelerator="cpu", devices=ranks, strategy="deepspeed_stage_3")
    lite.launch()
    with lite.init_module():
        net = Network()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = lite.setup(net, optimizer)
    inputs, targets = data(8).tensors

    def steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = mse_loss(model(inputs), targets)
            lite.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    steps(3)
    lite.save(path, {"model": model, "optimizer": optimizer})
    first = steps(4)
    lite.load(path, {"model": model, "optimizer": optimizer})
    return {"first": first, "again": steps(4), "files": sorted(p.name for p in path.iterdir())}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks, what, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    found = {"save": save, "resume": resume, "more": more}[what](ranks, folder)
    if os.environ.get("RANK", "0") == "0":
        Path(f"{what}-{ranks}.json").write_text(json.dumps(found))
