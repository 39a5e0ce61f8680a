"""What fsdp is compared in with one process and with ddp: `python fsdp_numbers.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fsdp_models import STEPS, Block, Net, loader, train, trainer
from torch import nn
from torch.distributed.tensor import DTensor

from stratagem.strategies import DDPStrategy, FSDPStrategy

out: dict[str, Any] = {"losses": {}, "val_loss": {}, "held": {}}


def local_numel(tensors: list[torch.Tensor]) -> int:
    return sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in tensors)


# -- the numbers of one process, for each way of sharding
ways: dict[str, Any] = {
    # The unused parameter makes ddp wait, unless it looks for it.
    "ddp": DDPStrategy(find_unused_parameters=True),
    "fsdp": "fsdp",
    "blocks": FSDPStrategy(auto_wrap_policy=Block),
    "grad_op": FSDPStrategy(
        sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}, activation_checkpointing=True
    ),
    "no_shard": FSDPStrategy(
        sharding_strategy="NO_SHARD",
        auto_wrap_policy=lambda m: isinstance(m, Block),
        backward_prefetch="BACKWARD_POST",
    ),
    "hybrid": FSDPStrategy(
        sharding_strategy="HYBRID_SHARD",
        auto_wrap_policy=100,
        forward_prefetch=True,
        activation_checkpointing=nn.Linear,
    ),
    "offload": "fsdp_cpu_offload",
    "whole": FSDPStrategy(reshard_after_forward=False, backward_prefetch=None),
}
for name, way in ways.items():
    runs, module = train(way, 2)
    out["losses"][name] = list(module.losses)
    out["val_loss"][name] = float(runs.callback_metrics["val_loss"])
    optimizer = module.optimizers()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    out["held"][name] = [local_numel(held), local_numel(moments)]
    runs.save_checkpoint(f"{name}.ckpt")
    if name == "blocks":
        out["predicted"] = torch.cat(runs.predict(module, loader(2))).flatten().tolist()
        out["again"] = runs.validate(module, loader(2), verbose=False)[0]["val_loss"]
        runs.options = replace(runs.options, max_steps=25)
        module.losses.clear()
        runs.fit(module, loader(2))
        out["second fit"] = module.losses
# -- checkpoints of others
for name in ("single_device", "ddp"):
    module = Net(seed=3)
    trainer(ways["blocks"], 2, max_steps=STEPS + 5).fit(module, loader(2), ckpt_path=f"{name}.ckpt")
    out["losses"][f"from {name}"] = module.losses
module = Net(seed=4)
trainer(DDPStrategy(find_unused_parameters=True), 2, max_steps=STEPS + 5).fit(
    module, loader(2), ckpt_path="blocks.ckpt"
)
out["losses"]["ddp from blocks"] = module.losses
Path(f"out{runs.global_rank}.json").write_text(json.dumps(out))
