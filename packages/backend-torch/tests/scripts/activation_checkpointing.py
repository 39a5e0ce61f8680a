"""Losses, weights and buffers with activation checkpointing, by strategy: `... OUT NAME [NAME]`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer, seed_everything
from stratagem.strategies import Recompute

WAYS: dict[str, Any] = {
    "none": None,
    "layers": True,
    "names": "layers.*",
    "class": nn.BatchNorm1d,
    "function": lambda part: isinstance(part, Layer),
    "kept": Recompute(keep="matmul"),
    "kept by list": Recompute("layers.*", keep=[torch.ops.aten.addmm.default]),
    "kept by function": Recompute(keep=lambda operation: "addmm" in operation.name()),
    "half": Recompute(share=0.5),
    "on the host": Recompute(offload=True),
}


class Layer(nn.Module):
    """Attention with dropout, then a linear pair with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        rate = 0.1 if self.training else 0.0
        attended = scaled_dot_product_attention(q, k, v, dropout_p=rate)
        x = x + self.drop(attended.transpose(1, 2).flatten(2))
        y = self.norm(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.down(self.up(y).relu()))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        seed_everything(3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return mse_loss(self.head(x).mean(1), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *more: Any) -> None:
        self.values.append(float(outputs["loss"]))


def fit(strategy: Any, devices: int, way: Any) -> tuple[list[float], dict[str, Any]]:
    """Return losses and the state after two epochs with accumulation."""
    seed_everything(5)
    inputs = torch.randn(16, 3, 8)
    data = TensorDataset(inputs, inputs.prod(1)[:, :1])
    losses, model = Losses(), Net()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        accumulate_grad_batches=2,
        activation_checkpointing=way,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, 4))
    assert trainer.activation_checkpointing is way
    state: Any = trainer.strategy.model_state(trainer.run.require_prepared()) or {}
    # An engine's state is in its own form: the losses of later steps depend on the weights.
    tensors = {name: value.tolist() for name, value in state.items() if isinstance(value, Tensor)}
    return losses.values, tensors


if __name__ == "__main__":
    out: dict[str, Any] = {}
    for name in sys.argv[2:]:
        devices = 1 if name == "single_device" else 2
        out[name] = {way: fit(name, devices, choice) for way, choice in WAYS.items()}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(sys.argv[1]).write_text(json.dumps(out))
