"""The bytes of parameters on each rank of pipeline 2 x shard 2 x tensor 2: `... OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem import Lite
from stratagem_mesh import MeshStrategy

WORDS, WIDTH = 64, 32
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH, bias=False)
        self.down = nn.Linear(16 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def held(lite: Lite) -> list[dict[str, int]]:
    """Return the bytes that each rank has, by the name of the parameter."""
    made = Tied()
    model, optimizer = lite.setup(made, torch.optim.AdamW(made.parameters()))
    tokens = torch.arange(8).reshape(2, 4)
    lite.step(model, [tokens], lambda own: model(own).square().mean())
    own = {name: _bytes(p) for name, p in model.named_parameters()}
    moments = [p for state in optimizer.state.values() for p in (state["exp_avg"],)]
    own["moments"] = sum(map(_bytes, moments))
    return lite.ranks.gather_objects(own)


def _bytes(tensor: Tensor) -> int:
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().nbytes())


if __name__ == "__main__":
    options: dict[str, Any] = {"tensor_plan": PLAN, "launcher": "fork"}
    mesh = MeshStrategy(pipeline=2, shard=2, tensor=2, **options)
    of_ranks = Lite(accelerator="cpu", devices=8, strategy=mesh).launch(held)
    whole = sum(p.nbytes for p in Tied().parameters())
    found = {"whole": whole, "tied": Tied().words.weight.nbytes, "ranks": of_ranks}
    Path(sys.argv[1]).write_text(json.dumps(found))
