"""Modules whose sequence cannot be divided, though their first outputs are right: `... OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem_mesh import MeshStrategy


class Right(nn.Module):
    """Attention with dropout; its last layer is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        attended = scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))


class ZeroPositions(Right):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[: x.shape[1]])


class ZeroScale(Right):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * x.mean(1, keepdim=True)


class InTraining(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True) if self.training else x)


class Buffer(Right):
    """Keeps a mean for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class Attribute(Right):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


class LayerDrop(Right):
    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5


class Penalized(Right):
    """Its loss has the gradient of its inputs."""


class Net(Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if isinstance(self.body, Penalized):
            x = x.requires_grad_()
        loss = mse_loss(self.body(x), y)
        if isinstance(self.body, Penalized):
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = Right, ZeroPositions, ZeroScale, InTraining, Buffer, Attribute, LayerDrop, Penalized


def message(kind: type[nn.Module]) -> str:
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MeshStrategy(context=2, context_modules=["body"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    x = torch.randn(8, 8, 8)
    try:
        trainer.fit(Net(kind()), DataLoader(TensorDataset(x, x.cumsum(1)), 4))
    except Exception as error:
        return f"{type(error).__name__} after {trainer.global_step} steps: {error}"
    return f"{trainer.global_step} steps"


if __name__ == "__main__":
    found = {kind.__name__: message(kind) for kind in KINDS}
    Path(sys.argv[1]).write_text(json.dumps(found))
