"""Blocks that hold parts of a sequence: `python tensor_sequence.py FOLDER RANKS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tensor_divide import gradients
from tensor_loss import of_cross_entropy
from tensor_models import Adapted, Attention, Feed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from stratagem import Lite
from stratagem.errors import StratagemError
from stratagem.strategies import apply_activation_checkpointing
from stratagem_mesh.tensor.layers import SequenceOptions, divide_layers

HEADS = dict.fromkeys(("attention.q", "attention.k", "attention.v"), "colwise")
HEADS["attention.out"] = "rowwise"
PLAN = {**HEADS, "up": "colwise", "down": "rowwise"}
FEED = {**HEADS, "feed.up": "colwise", "feed.down": "rowwise"}


class Heads(Attention):
    """As many heads as the features of a rank have."""

    @property
    def num_heads(self) -> int:
        return -1

    @num_heads.setter
    def num_heads(self, value: int) -> None:
        """Ignore the number of all heads."""


class Block(nn.Module):
    """Attention and two layers of its own, or a module with them; a scale that is trained."""

    def __init__(self, *, feed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention, self.after = nn.LayerNorm(16), Heads(), nn.RMSNorm(16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.dropout = nn.Dropout(dropout)
        self.feed = Feed() if feed else None
        if not feed:
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.kept: Any = None

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        dropped = self.dropout(torch.ones_like(x))
        self.kept = (dropped[:, 0] > 0).tolist()
        x = x + self.attention(self.norm(x + shift)) * self.scale * dropped
        after = self.after(x)
        return x + (self.feed(after) if self.feed else self.down(self.up(after).relu()))  # type: ignore[no-any-return]


class Body(nn.Module):
    """Calls blocks, with a trained tensor for all of them."""

    def __init__(self, count: int = 3, *, repeats: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(count))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 16))
        self.repeats, self.skips = repeats, 0
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: len(self.blocks) - self.skips]:
            x = self.between(self._call(block, x))
        return x

    def _call(self, block: nn.Module, x: Tensor) -> Any:
        if self.repeats and torch.is_grad_enabled():
            return checkpoint(block, x, self.shift, use_reentrant=False)
        return block(x, self.shift)


class Text(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(16, 16), nn.Dropout(0.0)
        self.body = Body(**options)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embedding(tokens))))  # type: ignore[no-any-return]


def tokens(length: int) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % 16


def divided(model: nn.Module, mesh: DeviceMesh, plan: Any = None, **options: Any) -> Any:
    if plan is None:
        body: Any = model.get_submodule("body")
        plan = FEED if body.blocks[0].feed else PLAN
    divide_layers(model, mesh, plan, sequence=SequenceOptions(**options))
    return model


def difference(mesh: DeviceMesh, length: int, *, checkpointed: bool, **options: Any) -> float:
    """Return how far loss, gradients and an evaluation are from one process."""
    torch.manual_seed(0)
    alone = Text(**options).double()
    model = divided(deepcopy(alone), mesh)
    if checkpointed:
        apply_activation_checkpointing(model, Block)
    batch = tokens(length)
    errors = [of_gradients(model, alone, batch)]
    model.eval()
    alone.eval()
    errors.append(of_gradients(model, alone, batch))
    with torch.inference_mode():
        errors.append(float((model(batch) - alone(batch)).abs().max()))
    return max(errors)


def of_gradients(model: nn.Module, alone: nn.Module, batch: Tensor) -> float:
    (loss, own), (of_one, expected) = (gradients(one, batch) for one in (model, alone))
    largest = {name: g.abs().max().clamp_min(1e-6) for name, g in expected.items()}
    errors = [float((own[n] - g).abs().max() / largest[n]) for n, g in expected.items()]
    return max(abs(loss - of_one), *errors)


def numbers(mesh: DeviceMesh) -> dict[str, float]:
    return {
        "whole": difference(mesh, 12, checkpointed=False),
        "filled": difference(mesh, 11, checkpointed=False, feed=True),
        "one position": difference(mesh, 1, checkpointed=False),
        "checkpointed": difference(mesh, 11, checkpointed=True, feed=True),
        "checkpointed calls": difference(mesh, 11, checkpointed=False, repeats=True),
        "one block": difference(mesh, 12, checkpointed=True, count=1),
    }


def masks(mesh: DeviceMesh) -> list[Any]:
    """Return what dropout keeps in two blocks, and the number that all ranks draw afterwards."""
    torch.manual_seed(0)
    model = divided(Text(count=2, dropout=0.5), mesh)
    kept = []
    for _ in range(2):
        model(tokens(12))
        kept.append([block.kept for block in model.body.blocks])
    return [*kept, torch.rand(1).item()]


def held(mesh: DeviceMesh) -> list[int]:
    """Return the bytes of the hidden states that blocks pass on, whole and in parts."""
    sizes: list[int] = []
    for model in (Text(), divided(Text(), mesh)):
        for block in model.body.blocks:
            block.register_forward_hook(lambda block, x, y: sizes.append(y.numel()))
        model(tokens(12))
    return sizes


class Positions(nn.Module):
    """Adds the number of each position of what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except StratagemError as error:
        return str(error)
    return "nothing was raised"


def with_part(part: nn.Module, name: str = "norm") -> Text:
    model = Text()
    setattr(model.body.blocks[1], name, part)
    return model


def recomputed_after_two_passes(mesh: DeviceMesh) -> None:
    """Run backward after two forward passes whose parts are equally long."""
    model = divided(Text(repeats=True), mesh)
    loss = model(tokens(11)).sum() + model(tokens(12)).sum()
    torch.autograd.backward(loss)


def messages(mesh: DeviceMesh) -> dict[str, str]:
    plain = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
    skipping, again, odd = divided(Text(), mesh), divided(Text(), mesh), divided(Text(), mesh)
    skipping.body.skips = 1
    again.body.between = lambda x: x.repeat(1, 2, 1)
    shared = Text()
    shared.norm = shared.body.blocks[0].norm  # type: ignore[assignment]
    repeated = Text()
    repeated.body.blocks[2] = repeated.body.blocks[0]
    depth: Any = Text()
    depth.body.layerdrop = 0.5
    gathering = {**PLAN, "up": "colwise_gather_output"}
    alone = {name: style for name, style in PLAN.items() if name != "down"}
    return {
        "no blocks": message(lambda: divided(Text(), mesh, plain)),
        "function": message(lambda: divided(Text(), mesh, lambda model, mesh: None)),
        "convolution": message(lambda: divided(with_part(nn.Conv1d(1, 1, 1)), mesh)),
        "attention": message(lambda: divided(with_part(nn.MultiheadAttention(16, 2)), mesh)),
        "dropout": message(
            lambda: divided(with_part(Adapted(nn.Linear(16, 64), dropout=0.1), "up"), mesh)
        ),
        "style": message(lambda: divided(Text(), mesh, gathering)),
        "no pair": message(lambda: divided(Text(), mesh, alone)),
        "repeated": message(lambda: divided(repeated, mesh)),
        "shared": message(lambda: divided(shared, mesh)),
        "depth": message(lambda: divided(depth, mesh)),
        "context": message(lambda: divided(Text(), mesh, regions=["body.blocks.*"])),
        "positions": message(lambda: divided(with_part(Positions()), mesh)(tokens(12))),
        "last block": message(lambda: skipping(tokens(12))),
        "between": message(lambda: again(tokens(12))),
        "alone": message(lambda: odd.body.blocks[1](torch.zeros(2, 12, 16), odd.body.shift)),
        "two passes": message(lambda: recomputed_after_two_passes(mesh)),
        "first tensor": message(lambda: odd.body(torch.zeros(2, 16))),
    }


def main(lite: Lite, folder: str) -> None:
    mesh = init_device_mesh("cpu", (lite.world_size,), mesh_dim_names=("tensor_parallel",))
    out: dict[str, Any] = {"numbers": numbers(mesh), "masks": masks(mesh), "held": held(mesh)}
    out["messages"] = messages(mesh)
    torch.manual_seed(0)
    out["losses"] = of_cross_entropy(Text, tokens(12), mesh)
    Path(folder, f"rank{lite.global_rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    fabric = Lite(accelerator="cpu", devices=int(sys.argv[2]), strategy="ddp")
    fabric.launch()
    main(fabric, sys.argv[1])
