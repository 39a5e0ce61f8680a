"""What Muon refuses on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem_extras.optimizers import Muon


def groups(model: nn.Module, turned: bool = False) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::-1] if turned else parameters, "muon": True}]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))


lite: Any = Lite(accelerator="cpu", devices=2, strategy="ddp")
lite.launch()
net = model()
optimizer = Muon(groups(net))
try:
    for step in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter) * (1 + step * lite.global_rank)
        optimizer.step()
except StratagemError as error:
    print(f"step {step}, rank {lite.global_rank}: {error}")

lite = Lite(accelerator="cpu", devices=2, strategy="fsdp")
lite.launch()
for options in ({"turned": lite.global_rank == 1}, {"distributed": False}):
    net = lite.setup(model())
    turned = options.pop("turned", False)
    optimizer = Muon(groups(net, turned), **options)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except StratagemError as error:
        print(f"rank {lite.global_rank}: {error}")
