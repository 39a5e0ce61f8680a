"""fsdp in real processes: the numbers of one process, half the state on each of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
try:
    import fsdp_script as shared
finally:
    sys.path.remove(str(HERE))

SCRIPT = """
import json, os, sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fsdp_script import *
from stratagem import Lite, Module
from stratagem.strategies import DDPStrategy, FSDPStrategy

out, weights = {}, {}


def local_numel(tensors):
    return sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in tensors)


# -- the numbers of one process, for each way of sharding
ways = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "blocks": FSDPStrategy(auto_wrap_policy=Block),
    "grad_op": FSDPStrategy(
        sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}, activation_checkpointing=True
    ),
    "no_shard": FSDPStrategy(
        sharding_strategy="NO_SHARD", auto_wrap_policy=lambda m: isinstance(m, Block),
        backward_prefetch="BACKWARD_POST",
    ),
    "hybrid": FSDPStrategy(
        sharding_strategy="HYBRID_SHARD", auto_wrap_policy=100, forward_prefetch=True,
        activation_checkpointing=nn.Linear,
    ),
    "offload": "fsdp_cpu_offload",
    "whole": FSDPStrategy(reshard_after_forward=False, backward_prefetch=None),
}
if sys.argv[1] == "numbers":
    out["losses"], out["val_loss"], out["held"] = {}, {}, {}
    for name, way in ways.items():
        # The unused parameter makes ddp wait, unless it looks for it.
        way = DDPStrategy(find_unused_parameters=True) if name == "ddp" else way
        runs, module = train(way, 2)
        out["losses"][name] = module.losses
        out["val_loss"][name] = float(runs.callback_metrics["val_loss"])
        weights[name] = runs.strategy.model_state(runs.lite._prepared[-1]) if 0 else None
        held = [p for p in module.parameters()]
        state = runs.optimizers[0].state
        moments = [s["exp_avg"] for s in state.values()]
        out["held"][name] = [local_numel(held), local_numel(moments)]
        runs.save_checkpoint(f"{name}.ckpt")
        if name == "blocks":
            out["predicted"] = torch.cat(runs.predict(module, loader(2))).flatten().tolist()
            out["again"] = runs.validate(module, loader(2), verbose=False)[0]["val_loss"]
            runs.max_steps = 25
            runs.fit(module, loader(2))
            out["second fit"] = module.losses[2 * STEPS:]
    # -- checkpoints of others
    for name in ("single_device", "ddp"):
        module = Net(seed=3)
        trainer(ways["blocks"], 2, max_steps=STEPS + 5).fit(
            module, loader(2), ckpt_path=f"{name}.ckpt"
        )
        out["losses"][f"from {name}"] = module.losses
    module = Net(seed=4)
    trainer(DDPStrategy(find_unused_parameters=True), 2, max_steps=STEPS + 5).fit(
        module, loader(2), ckpt_path="blocks.ckpt"
    )
    out["losses"]["ddp from blocks"] = module.losses
    rank = runs.global_rank


Path(f"out{rank}.json").write_text(json.dumps(out))
"""


def launch(folder: Path, *arguments: str, script: str = SCRIPT) -> list[dict[str, Any]]:
    (folder / "script.py").write_text(script)
    dropped = ("RANK", "WORLD", "MASTER", "NODE", "STRATAGEM", "TORCHELASTIC")
    environment = {k: v for k, v in os.environ.items() if not any(part in k for part in dropped)}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "script.py", *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("out*.json"))]


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], float, list[float]]:
    """Losses of each batch in one process, and what validation says; then five steps more."""
    runs, module = shared.train("single_device")
    later = shared.Net()
    return module.losses, float(runs.callback_metrics["val_loss"]), later.losses
