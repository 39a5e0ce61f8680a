"""Mistakes that `MeshStrategy(check=True)` finds before training: `python mesh_before.py OUT`."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesh_plants import PLANTS, Plant, batch
from mesh_subjects import Chain, PLAN, Net
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem_mesh import MeshStrategy

VECTORS = torch.linspace(-1, 1, 32).reshape(4, 8)
FOUND = [
    *("a gradient summed twice", "a gradient of a part", "a mask dropped"),
    *("labels cut before the shift", "a tied weight divided twice"),
]


class Layer(Net):
    """A block; `is_late` is a number by which its class computes."""

    is_late = False

    def __init__(self, is_late: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.is_late = is_late

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + self.down(self.up(x).relu()))
        is_divided = any(isinstance(p, DTensor) for p in self.up.parameters())
        return y + y if self.is_late and is_divided else y


class Deep(nn.Module):
    """A mistake in the last of its five layers, which is of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(is_late=index == 4) for index in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FailsOnce(Net):
    """Raises on the second rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no luck")
        return super().forward(x)


def prepared(lite: Lite, build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Set a model up; return what has changed of it and of the numbers that are drawn."""
    torch.manual_seed(lite.global_rank)
    model = build()
    if lite.global_rank and not any(p.is_meta for p in model.parameters()):
        nn.init.zeros_(next(model.parameters()))  # the values of rank 0 count
    names = [name for name, _ in model.named_parameters()]
    before = torch.get_rng_state(), random.getstate()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, _ = lite.setup(model.train(), torch.optim.SGD(trained, lr=0.1))
    return {
        "numbers": torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate(),
        "names": names == [name for name, _ in model.named_parameters()],
        "dtype": str(next(model.parameters()).dtype),
        "gradients": any(p.grad is not None for p in model.parameters()),
    }


def said(build: Callable[[], nn.Module], **options: Any) -> Any:
    """Return what was found in a model that is set up, or the error."""
    strategy = MeshStrategy(**{"check": True, "launcher": "fork", **options})
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
    try:
        return lite.launch(prepared, build)
    except StratagemError as error:
        return str(error)


def planted(plant: Plant) -> Any:
    options = {**plant.subject.options, "example_input": batch(0)}
    with plant.plant():
        return said(plant.subject.build, **options)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def cases() -> dict[str, Any]:
    plan = {"tensor": 2, "tensor_plan": PLAN, "example_input": VECTORS}
    chain = {"tensor": 2, "tensor_plan": PLAN, "example_input": torch.ones(2, 6, 8).cumsum(1)}
    found = {
        "right": said(Net, **plan),
        "right, sequence parallel": said(Chain, **chain, sequence_parallel=True),
        "on meta": said(on_meta, **plan),
        "wrong in a kind": said(Deep, **plan),
        "one rank fails": said(FailsOnce, **plan),
        "no example": said(Net, **{**plan, "example_input": None}),
        "off": said(Deep, **{**plan, "check": False}),
    }
    for name in [*(one for one in PLANTS if one.startswith("nothing")), *FOUND]:
        # A pipeline has no comparison before training.
        if "transformers" not in name and "pipeline" not in PLANTS[name].subject.options:
            found[name] = planted(PLANTS[name])
    if find_spec("transformers"):
        found |= of_transformers()
    return found


def of_transformers() -> dict[str, Any]:
    from mesh_plants import LLAMA, TransformersModel, not_shifted, patch

    found = {
        f"llama, {name}": said(LLAMA.build, **options)
        for name, options in {
            "tensor": {"tensor": 2},
            "context": {"context": 2},
            "sequence and loss parallel": {
                "tensor": 2,
                "sequence_parallel": True,
                "loss_parallel": True,
            },
        }.items()
    }
    with patch.object(TransformersModel, "_divide_loss", not_shifted):
        found["llama, labels cut"] = said(LLAMA.build, context=2)
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # torch warns of every last layer that reads sequences
    Path(sys.argv[1]).write_text(json.dumps(cases()))
