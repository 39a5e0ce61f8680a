"""The model, the data and the cases that run under every strategy, with and without XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer

SAMPLES = 48
BATCH = 8


class Block(nn.Module):
    """A residual block, so that the model has some for sharding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(self.dropout(torch.tanh(self.up(x))))
        return output


class Net(Module):
    """Two blocks and a head whose 3 outputs no number of devices divides."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.losses: list[Tensor] = []
        self.dtypes: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        self.dtypes.add(str(output.dtype))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def dataset(samples: int = SAMPLES) -> TensorDataset:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs[:, :3].roll(1, 1))


def loader(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(samples), **{"batch_size": BATCH, **options})


def trainer(strategy: str, folder: Path, **options: Any) -> Trainer:
    on_cpu = {"accelerator": "cpu", "devices": 1} if strategy == "single_device" else {}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(
        **{"max_epochs": 1, **on_cpu, **quiet, **options},
        strategy=strategy,
        default_root_dir=folder,
    )


def fit(strategy: str, folder: Path, net: Net | None = None, **options: Any) -> Net:
    net = net or Net()
    ckpt_path = options.pop("ckpt_path", None)
    trainer(strategy, folder, **options).fit(net, loader(), ckpt_path=ckpt_path)
    return net


def lite_of(strategy: str, **options: Any) -> Lite:
    on_cpu: dict[str, Any] = {}
    if strategy == "single_device":
        on_cpu = {"accelerator": "cpu", "devices": 1}
    lite = Lite(strategy=strategy, **on_cpu, **options)
    lite.launch()
    return lite


def by_hand(strategy: str) -> tuple[list[float], list[float]]:
    """Train an epoch in a loop under Lite, clipped; return the losses and those of evaluation."""
    lite = lite_of(strategy)
    net = Net()
    module, optimizer = lite.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    batches = lite.setup_dataloaders(loader())
    losses = []
    for inputs, targets in batches:
        loss = mse_loss(module(inputs), targets)
        lite.backward(loss)
        lite.clip_gradients(module, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        evaluated = [mse_loss(module(inputs), targets).item() for inputs, targets in batches]
    return losses, evaluated


def numbers(values: list[Tensor]) -> list[float]:
    return [float(value) for value in values]


def error_of(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
