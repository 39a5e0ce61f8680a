"""Models divided between ranks, beside whole ones: `python tensor_divide.py FOLDER RANKS`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tensor_models import CASES, Adapted, Case, adapted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from stratagem import Lite
from stratagem.errors import ConfigurationError
from stratagem_mesh.tensor.layers import divide_layers


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module, example: Tensor) -> tuple[float, dict[str, Any]]:
    model.zero_grad()
    loss = model(example).square().mean()
    torch.autograd.backward(loss)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), {name: whole(p.grad) for name, p in trained.items()}


def compare(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = case.build().double()
    model = deepcopy(reference)
    layers = divide_layers(model, mesh, case.plan, case.example)
    loss, own = gradients(model, case.example)
    expected_loss, expected = gradients(reference, case.example)
    assert own.keys() == expected.keys()
    errors = [
        float((own[n] - g).abs().max() / g.abs().max().clamp_min(1e-6)) for n, g in expected.items()
    ]
    model.eval()
    with torch.inference_mode():
        evaluated = model(case.example) - reference.eval()(case.example)
    parameters = dict(model.named_parameters())
    divided = [
        p.numel()
        for p in parameters.values()
        if isinstance(p, DTensor) and isinstance(p.placements[0], Shard)
    ]
    return {
        "layers": layers,
        "loss": abs(loss - expected_loss),
        "gradient": max(errors),
        "evaluation": float(evaluated.abs().max()),
        "share": sum(divided) / sum(p.numel() for p in parameters.values()),
        "values": all(
            torch.equal(whole(parameters[n]), p) for n, p in reference.named_parameters()
        ),
        "tied": parameters.keys() == dict(reference.named_parameters()).keys() and is_tied(model),
        "copy": difference_of_copy(model, case.example),
    }


def is_tied(model: Any) -> bool:
    return hasattr(model, "embedding") and model.head.weight is model.embedding.weight


def difference_of_copy(model: nn.Module, example: Tensor) -> float:
    with torch.no_grad():
        return float((deepcopy(model)(example) - model(example)).abs().max())


class Dropping(nn.Module):
    """Returns what its dropouts keep: within the divided features, and outside."""

    def __init__(self, inside: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.inside, self.outside = nn.Dropout(inside), nn.Dropout(0.5)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(torch.ones_like(self.up(x)))
        y: Tensor = self.outside(torch.ones_like(self.down(hidden)))
        self.kept = (hidden > 0).tolist(), (y > 0).tolist()
        return y


def masks(mesh: DeviceMesh, *, inside: float = 0.5) -> list[Any]:
    kept = []
    model = Dropping(inside).double()
    whole_model = deepcopy(model)
    divide_layers(model, mesh, {"up": "colwise", "down": "rowwise"})
    for module in (model, whole_model):
        torch.manual_seed(0)
        for _ in range(2):
            module(torch.ones(2, 8, dtype=torch.float64))
            kept.append(module.kept)
    return kept


def adapter_masks(mesh: DeviceMesh) -> list[Any]:
    """Return what the dropouts of a colwise and a rowwise layer with LoRA keep, for each call."""
    kept: list[Any] = []
    model = nn.Sequential(
        Adapted(nn.Linear(8, 64), dropout=0.5), Adapted(nn.Linear(64, 8), dropout=0.5)
    )
    for part in model:
        dropout: Any = part.lora_dropout
        dropout.default.register_forward_hook(lambda layer, x, y: kept.append((y != 0).tolist()))
    divide_layers(model, mesh, {"0": "colwise", "1": "rowwise"})
    torch.manual_seed(0)
    for _ in range(2):
        model(torch.ones(2, 8))
    return [*kept, torch.rand(1).item()]


BAD: dict[str, Any] = {
    "pattern": {"attention.quaries": "colwise"},
    "kind": {"norm": "colwise"},
    "nothing": {},
}


def messages(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    for name, plan in BAD.items():
        try:
            divide_layers(CASES["separate"].build(), mesh, plan)
        except ConfigurationError as error:
            found[name] = str(error)
    odd = CASES["separate"].build()
    odd.attention.num_heads = 3  # type: ignore[union-attr]
    variant: Any = adapted()
    variant[0].lora_variant = {"default": object()}
    for name, model, plan, example in (
        ("variant of LoRA", variant, {"0": "colwise"}, None),
        ("style of LoRA", adapted(), {"0": ColwiseParallel()}, None),
        ("heads", odd, {"attention.q": "colwise"}, None),
        ("features", nn.Sequential(nn.Linear(8, 7)), {"0": "colwise"}, None),
        ("no example", nn.Sequential(nn.Linear(8, 8)), None, None),
        ("bad example", nn.Sequential(nn.Linear(8, 8)), None, torch.ones(1, 7)),
        ("one layer", nn.Sequential(nn.Linear(8, 8)), None, torch.ones(1, 8)),
    ):
        try:
            divide_layers(model, mesh, plan, example)
        except ConfigurationError as error:
            found[name] = str(error)
    return found


@contextmanager
def capture(name: str) -> Iterator[list[str]]:
    """Yield the messages of a logger and of its children."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.level = before


def main(lite: Lite, folder: str) -> None:
    mesh = init_device_mesh("cpu", (lite.world_size,), mesh_dim_names=("tensor_parallel",))
    out: dict[str, Any] = {name: compare(case, mesh) for name, case in CASES.items()}
    with capture("stratagem") as records:
        divide_layers(CASES["returned"].build(), mesh, None, CASES["returned"].example)
    out["info"] = records
    out["masks"] = masks(mesh)
    out["masks outside"] = masks(mesh, inside=0.0)
    out["adapter masks"] = adapter_masks(mesh)
    out["messages"] = messages(mesh)
    Path(folder, f"rank{lite.global_rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    fabric = Lite(accelerator="cpu", devices=int(sys.argv[2]), strategy="ddp")
    fabric.launch()
    main(fabric, sys.argv[1])
