"""Muon under strategies of four ranks, and checkpoints between them: `... OUT NAME ...`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem.strategies import FSDPStrategy, MeshStrategy
from stratagem_extras.optimizers import Muon

RANKS = 4
STRATEGIES: dict[str, Any] = {
    "single_device": lambda: "single_device",
    "ddp": lambda: "ddp",
    "ddp_sharded": lambda: "ddp_sharded",
    "fsdp": lambda: "fsdp",
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    "mesh": lambda: MeshStrategy(),
    "tensor": lambda: MeshStrategy(
        tensor=2, tensor_plan={"layers.up": "colwise", "layers.down": "rowwise"}
    ),
    "deepspeed": lambda: "deepspeed_stage_1",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(16, 6)
        self.layers = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})
        self.square = nn.Linear(6, 7, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 7, 6) / 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        hidden = self.words(x)
        hidden = hidden + self.layers["down"](self.layers["up"](hidden).tanh())
        mixed = torch.einsum("bi,eij->bj", self.square(hidden), self.experts)
        return self.head(hidden + mixed)


def optimizer_of(model: nn.Module) -> Muon:
    named = dict(model.named_parameters())
    experts = named.pop("experts")
    others = {"params": list(named.values()), "names": list(named)}
    batch = {"params": [experts], "names": ["experts"], "muon": True, "lr": 0.01}
    return Muon(
        [others, batch],
        lr=0.02,
        adamw_lr=0.01,
        adamw_names=("words*", "head*"),
        ns_dtype=torch.float32,
    )


def batches(start: int, stop: int) -> Any:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 16, (4, 8), generator=draw)
    labels = torch.randint(0, 5, (4, 8), generator=draw)
    return list(zip(inputs, labels, strict=True))[start:stop]


def main(out: str, names: list[str]) -> None:
    for name in names:
        for form in ("single_file", "directory"):
            lite = Lite(
                accelerator="cpu",
                devices=1 if name == "single_device" else RANKS,
                strategy=STRATEGIES[name](),
                plugins=form,
            )
            lite.launch()
            parts = 1 if name == "single_device" else 2 if name == "tensor" else RANKS
            part = lite.global_rank // (RANKS // parts) if parts > 1 else 0

            def prepared(lite: Lite = lite) -> Any:
                model = Net()
                return lite.setup(model, optimizer_of(model))

            def train(
                model: Any,
                optimizer: Any,
                start: int,
                stop: int,
                lite: Lite = lite,
                part: int = part,
                parts: int = parts,
            ) -> None:
                for inputs, labels in batches(start, stop):
                    mine = slice(part * (8 // parts), (part + 1) * (8 // parts))
                    loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
                    lite.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

            try:
                model, optimizer = prepared()
                train(model, optimizer, 0, 2)
                lite.save(f"{out}/{name}.{form}", {"model": model, "optimizer": optimizer})
                train(model, optimizer, 2, 4)
                lite.save(f"{out}/{name}.{form}.end", {"model": model})
                # The checkpoint of one process, and of this strategy.
                for source in ("single_device", name):
                    model, optimizer = prepared()
                    found = {"model": model, "optimizer": optimizer}
                    lite.load(f"{out}/{source}.{form}", found)
                    train(model, optimizer, 2, 4)
                    lite.save(f"{out}/{name}.{form}.from.{source}", {"model": model})
            except StratagemError as error:
                if lite.is_global_zero:
                    print(f"{name}: {error}")
                break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
