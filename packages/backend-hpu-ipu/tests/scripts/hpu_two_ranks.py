"""Two ranks of ddp on the CPU, or of hpu_parallel: `python hpu_two_ranks.py FOLDER cpu|hpu`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gaudi import two_devices

folder = Path(sys.argv[1])
two_devices(folder)

import torch
import torch.distributed as dist
from device_models import Net, fit, loader, trainer

from stratagem.strategies import HPUParallelStrategy
from stratagem_hpu_ipu.hpu_accelerator import HPUAccelerator

out: dict[str, Any] = {}
ours: dict[str, Any] = {"accelerator": "hpu", "devices": 2}


def run(**options: Any) -> dict[str, Any]:
    """Fit; return losses and weights, on the host."""
    net = fit(folder, **options)
    weights = {name: value.cpu() for name, value in net.state_dict().items()}
    return {"losses": [float(loss) for loss in net.losses], **weights}


if sys.argv[2] == "cpu":
    reference = run(accelerator="cpu", devices=2, strategy="ddp")
    torch.save(reference, folder / f"ddp{dist.get_rank()}.pt")
    sys.exit()

HPUAccelerator().setup()  # the simulated device must have its name before a torch.device has it
first = trainer(folder, max_epochs=1, **ours)
half = Net()
torch.manual_seed(7)
first.fit(half, loader())

from habana_frameworks import torch as sdk

out["strategy"] = first.plan.strategy.name
out["group"] = dist.get_backend()
out["first calls"] = [list(call) for call in sdk.calls[:2]]
sdk.calls.clear()
first.strategy.ranks.broadcast({"plain": [1, 2]})
out["sizes"] = sdk.calls[0][1]
out["gathered"] = first.strategy.ranks.gather_objects(first.global_rank)

first.save_checkpoint(folder / "half.ckpt")
whole = run(**{**ours, "strategy": HPUParallelStrategy(process_group_backend="hccl")})
resumed = fit(folder, ckpt_path=folder / "half.ckpt", **ours).state_dict()
out["resumed"] = all(torch.equal(value.cpu(), whole[name]) for name, value in resumed.items())
sdk.calls.clear()
fit(folder, **ours, max_epochs=1, limit_train_batches=1)
names = [name for name, _ in sdk.calls if name in ("allreduce", "mark_step")]
out["calls of a step"] = names[names.index("mark_step") - 1 :][:3]
ddp = torch.load(folder / f"ddp{dist.get_rank()}.pt", weights_only=True)
pairs = zip(whole.pop("losses"), ddp.pop("losses"), strict=True)
out["losses differ by"] = max(abs(a - b) for a, b in pairs)
out["weights differ by"] = max(
    float((value.double() - ddp[name].double()).abs().max()) for name, value in whole.items()
)
(folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
