"""Cases that need a process of their own: `python one_case.py CASE FOLDER`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from xla_models import Net, error_of, fit, lite_of, loader, numbers

case, folder = sys.argv[1], Path(sys.argv[2])
result: Any = None
if case == "backward before":
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    result = error_of(lite_of, "single_xla")
elif case == "debug":
    fit("xla_debug", folder)
elif case == "tied weights":
    lite = lite_of("xla_fsdp")
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    module, _ = lite.setup(tied, torch.optim.SGD(tied.parameters(), lr=0.1))
    lite.save(folder / "tied.ckpt", {"model": module})
    saved = torch.load(folder / "tied.ckpt", weights_only=True)["model"]
    result = [
        tied[0].weight is tied[1].weight,
        saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr(),
    ]
elif case == "torch_xla's FSDP":
    # Their wrapper beside our strategy, in one process: divisions and losses are the same.
    import numpy as np
    import torch_xla
    from torch_xla.distributed import spmd
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
        SpmdFullyShardedDataParallel,
    )

    lite = lite_of("xla_fsdp")
    division = torch_xla._XLAC._get_xla_sharding_spec
    mesh = spmd.Mesh(np.arange(4), (4,), ("fsdp",))
    found = []
    for kind in ("ours", "theirs"):
        net = Net()
        if kind == "ours":
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            module, _ = lite.setup(net, optimizer)
        else:
            blocks = [
                SpmdFullyShardedDataParallel(b.to("xla"), mesh=mesh) for b in net.blocks.children()
            ]
            net.blocks = nn.ModuleList(blocks)
            module = SpmdFullyShardedDataParallel(net, mesh=mesh)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = []
        for inputs, targets in lite.setup_dataloaders(loader()):
            loss = mse_loss(module(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            losses.append(loss.item())
        named = {n.replace("_orig_module.", ""): division(p) for n, p in net.named_parameters()}
        found.append({"losses": losses, "divided": named})
    result = found
elif case == "model used before":
    # By one strategy after another, and as often by one that knows no division.
    result = []
    for names in (("xla", "xla_fsdp", "xla", "single_device"), ("single_device",) * 4):
        net = Net()
        for name in names:
            fit(name, folder, net)
        result.append(numbers(net.losses))
print("RESULT" + json.dumps(result))
