"""What two ranks do on the simulated devices 1 and 3: `python two_ranks.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_models import Net, fit, loader, model, same, steps, trainer

from stratagem import Lite
from stratagem.strategies import DDPStrategy

folder = Path(sys.argv[1])
out: dict[str, Any] = {}
ours: dict[str, Any] = {"devices": [1, 3], "strategy": "ddp"}
theirs: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


def distance(one: Net, other: Net) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs)


# -- the same values as on the CPU, with batch statistics of all ranks too
net = fit(folder, **ours)
out["devices"], out["group"] = sorted(net.devices), dist.get_backend()
out["differ by"] = distance(net, fit(folder, **theirs))
synced = [
    fit(folder, **{**options, "strategy": DDPStrategy(sync_batchnorm=True)})
    for options in (ours, theirs)
]
out["synchronized differ by"] = distance(*synced)
out["synchronized differs from plain"] = distance(net, synced[0])

# -- buffers become those of rank 0 for an evaluation
turned: Any = net.net.turned
turned += dist.get_rank()
trainer(folder, **ours).validate(net, loader(), verbose=False)
out["turned"] = turned.tolist()

# -- resuming, with dropout drawn on each rank's device
whole = fit(folder, dropout=0.5, **ours)
half = Net(0.5)
torch.manual_seed(7)
first = trainer(folder, max_epochs=1, **ours)
first.fit(half, loader())
first.save_checkpoint(folder / "half.ckpt")
torch.rand(7, device=net.device)
resumed = fit(folder, dropout=0.5, ckpt_path=folder / "half.ckpt", **ours)
out["resumed"] = same(whole.state_dict(), resumed.state_dict())


def with_state(**options: Any) -> list[float]:
    """Train by hand with an optimizer that has taken a step on the host."""
    lite = Lite(**options)
    lite.launch()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return steps(lite, *lite.setup(net, optimizer))


# -- shards in host memory
offloaded = {"accelerator": "sim", "devices": [1, 3], "strategy": "fsdp_cpu_offload"}
out["with state"] = [with_state(**options) for options in (offloaded, theirs)]

# -- a tensor that is not contiguous
grid = torch.arange(6.0).reshape(2, 3).t()
out["reduced"] = net.trainer.strategy.ranks.all_reduce(grid, "sum").tolist()

out["mixed"] = sorted(fit(folder, precision="bf16-mixed", **ours).net.dtypes)
(folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
