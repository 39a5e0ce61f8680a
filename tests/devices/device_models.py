"""Models and data of the scripts in this folder; the values are the same in each process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer

# Of the simulated device's kernels, which compute on copies.
warnings.filterwarnings("ignore", message="An output with one or more elements was resized")


class Tied(nn.Module):
    """A model whose first and last layer share a weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("turned", torch.ones(2, 3).t())
        self.dtypes: set[str] = set()

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        self.dtypes.add(str(hidden.dtype))
        return self.last(self.dropout(torch.tanh(self.norm(hidden))))  # type: ignore[no-any-return]


def model(dropout: float = 0.0) -> Tied:
    torch.manual_seed(1)
    return Tied(dropout)


def loader(size: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=size)


class Net(Module):
    """Trains `Tied`; notes on which device each batch lies."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = model(dropout)
        self.devices: set[str] = set()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.devices |= {str(inputs.device), str(targets.device)}
        loss = mse_loss(self.net(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults = {"max_epochs": 2, "devices": [2], "accelerator": "sim", "logger": False}
    return Trainer(
        **{**defaults, **options},
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )


def fit(folder: Path, *, dropout: float = 0.0, ckpt_path: Any = None, **options: Any) -> Net:
    net = Net(dropout)
    torch.manual_seed(7)
    trainer(folder, **options).fit(net, loader(), ckpt_path=ckpt_path)
    return net


def steps(
    lite: Lite, module: Any, optimizer: Any, batches: Any = None, then: Callable[[int], Any] = id
) -> list[float]:
    """Train an epoch by hand; return the losses."""
    losses = []
    for number, (inputs, targets) in enumerate(batches or lite.setup_dataloaders(loader()), 1):
        loss = mse_loss(module(inputs), targets)
        lite.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        then(number)
    return losses


def on_host(values: Any) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in values.items()}


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.items(), other.items(), strict=True)
    return all(name == key and torch.equal(a.cpu(), b.cpu()) for (name, a), (key, b) in pairs)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
