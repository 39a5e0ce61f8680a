"""AdamW8bit under strategies of two ranks, and checkpoints between them: `... OUT NAME ...`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem.strategies import MeshStrategy
from stratagem_extras.optimizers import AdamW8bit

STEPS = 20
PLAN = {"layers.up": "colwise", "layers.down": "rowwise"}
STRATEGIES: dict[str, Any] = {
    "single_device": lambda: "single_device",
    "ddp": lambda: "ddp",
    "ddp_sharded": lambda: "ddp_sharded",
    "fsdp": lambda: "fsdp",
    "mesh": lambda: MeshStrategy(shard=2),
    "tensor": lambda: MeshStrategy(tensor=2, tensor_plan=PLAN),
    "cut": lambda: MeshStrategy(tensor=2, tensor_plan=PLAN),
    "deepspeed": lambda: "deepspeed_stage_1",
}


class Net(nn.Module):
    """Has parameters of all kinds: small ones, uneven rows and columns, and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(33, 128)
        self.norm = nn.LayerNorm(128)
        self.layers = nn.ModuleDict({"up": nn.Linear(128, 512), "down": nn.Linear(512, 128)})
        self.wide = nn.Linear(128, 300)
        self.experts = nn.Parameter(torch.randn(3, 300, 20) / 17)
        self.head = nn.Linear(20, 33)

    def forward(self, x: Any) -> Any:
        hidden = self.words(x)
        hidden = hidden + self.layers["down"](self.layers["up"](self.norm(hidden)).tanh())
        return self.head(torch.einsum("bi,eij->bj", self.wide(hidden), self.experts))


def batches(start: int, stop: int) -> Any:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 33, (STEPS + 4, 8), generator=draw)
    return [(x, (x + 1) % 33) for x in inputs][start:stop]


def main(out: str, names: list[str]) -> None:
    for name in names:
        for form in ("single_file", "directory"):
            ranks = 1 if name == "single_device" else 2
            lite = Lite(accelerator="cpu", devices=ranks, strategy=STRATEGIES[name](), plugins=form)
            lite.launch()
            parts = 1 if name in ("single_device", "tensor", "cut") else ranks
            part = lite.global_rank if parts > 1 else 0
            # Ranks of a tensor axis of 2 hold 256 columns of layers.down.
            block = 512 if name == "cut" else 256

            def prepared(lite: Lite = lite, block: int = block) -> Any:
                model = Net().double()  # so that the order of sums changes no code
                named = model.named_parameters()
                return lite.setup(model, AdamW8bit(named, lr=1e-3, block_size=block))

            def train(
                model: Any,
                optimizer: Any,
                start: int,
                stop: int,
                lite: Lite = lite,
                part: int = part,
                parts: int = parts,
            ) -> list[float]:
                losses = []
                for inputs, labels in batches(start, stop):
                    mine = slice(part * (8 // parts), (part + 1) * (8 // parts))
                    loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
                    lite.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(lite.all_reduce(loss.detach())))
                return losses

            try:
                model, optimizer = prepared()
                losses = train(model, optimizer, 0, STEPS)
                path = f"{out}/{name}.{form}"
                lite.save(path, {"model": model, "optimizer": optimizer, "losses": losses})
                after = train(model, optimizer, STEPS, STEPS + 4)
                lite.save(f"{path}.end", {"model": model, "optimizer": optimizer, "losses": after})
                # The checkpoint of one process, and of this strategy: saved again, and continued.
                for source in ("single_device", name):
                    model, optimizer = prepared()
                    found = {"model": model, "optimizer": optimizer}
                    lite.load(f"{out}/{source}.{form}", found)
                    lite.save(f"{path}.again.{source}", found)
                    after = train(model, optimizer, STEPS, STEPS + 4)
                    lite.save(f"{path}.from.{source}", {**found, "losses": after})
            except StratagemError as error:
                if lite.is_global_zero:
                    print(f"{name}: {error}")
                break


def resume_in_one_process(out: str, names: list[str]) -> None:
    """Load the checkpoints of strategies in one process, save them again and continue."""
    for name in names:
        for form in ("single_file", "directory"):
            lite = Lite(accelerator="cpu", devices=1, strategy="single_device", plugins=form)
            lite.launch()
            model = Net().double()
            found = dict(
                zip(
                    ("model", "optimizer"),
                    lite.setup(model, AdamW8bit(model.named_parameters(), lr=1e-3)),
                    strict=True,
                )
            )
            lite.load(f"{out}/{name}.{form}", found)
            lite.save(f"{out}/{name}.{form}.alone", found)


if __name__ == "__main__":
    if sys.argv[2] == "alone":
        resume_in_one_process(sys.argv[1], sys.argv[3:])
    else:
        main(sys.argv[1], sys.argv[2:])
