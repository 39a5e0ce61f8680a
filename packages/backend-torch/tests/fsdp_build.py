"""A model built in pieces: `python fsdp_build.py WIDTH LAYERS`."""

from __future__ import annotations

import copy
import importlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stratagem import Lite


class Layer(nn.Module):
    rope: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("rope", torch.arange(width).float().sin())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(x))) + self.rope
        return output


class Net(nn.Module):
    """Does in its constructor what models do there, and the meta device cannot."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, layers)]
        self.table = nn.Embedding(100, width, padding_idx=3)
        first = Layer(width)
        self.layers = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(2))])
        self.layers.extend(Layer(width) for _ in range(layers - 3))
        self.last = nn.Linear(width, 100, bias=False)
        self.last.weight = self.table.weight
        self.apply(self._init)
        nn.init.orthogonal_(self.layers[0].up.weight[:50, :50])  # type: ignore[union-attr,index]
        self.layers[1].up.weight.data.mul_(2.0)  # type: ignore[union-attr,operator]
        self.size = sum(p.numel() for p in self.parameters())

    @staticmethod
    def _init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.last(x)
        return output


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


width, layers = map(int, sys.argv[1:])
lite = Lite(accelerator="cpu", strategy="fsdp", devices=2)
lite.launch()
# Ranks that would draw different numbers draw rank 0's, and go on with their own.
torch.manual_seed(3 + lite.global_rank)
if lite.global_rank:
    expected = torch.rand(1)
    torch.manual_seed(3 + lite.global_rank)
out: dict[str, Any] = {}
# torch imports it, with what it needs, for the first optimizer; that is not the model's.
importlib.import_module("torch._dynamo")
before = peak()
with lite.init_module():
    net = Net(width, layers)
if lite.global_rank:
    out["own numbers"] = torch.equal(torch.rand(1), expected)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model, optimizer = lite.setup(net, optimizer)
out["peak"], out["total"] = peak() - before, net.size * 4 / 2**20
lite.backward(model(torch.zeros(2, 3, dtype=torch.long)).square().mean())
optimizer.step()
out["finite"] = bool(model(torch.zeros(2, 3, dtype=torch.long)).isfinite().all())

with lite.init_module():
    again = Net(width, layers)
state = lite.setup(again).state_dict()
if lite.global_rank == 0:
    torch.manual_seed(3)
    Net(width, layers)
    plain = Net(width, layers).state_dict()
    out["differ"] = [name for name in plain if not torch.equal(plain[name], state[name])]
    out["names"] = list(state) == list(plain)
Path(f"out{lite.global_rank}.json").write_text(json.dumps(out))
