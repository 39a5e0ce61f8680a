"""A small model with what trips up ZeRO, and how the tests train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer

STEPS = 20


def data(samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=generator)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True))


def loader(ranks: int, samples: int = 64) -> DataLoader[Any]:
    """Batches of 8 over all ranks together."""
    return DataLoader(data(samples), batch_size=8 // ranks)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return output


class Network(nn.Module):
    """Tied, frozen and root-level parameters, odd sizes, a block called twice, and a
    layer that is only looked into."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(3)])
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.blocks[0].mix = nn.Parameter(torch.randn(7, 7) / 3)
        self.called_by_function = nn.Linear(7, 3, bias=False)
        self.last = nn.Linear(7, 1)
        self.shift = nn.Parameter(torch.zeros(3))
        self.blocks[1].requires_grad_(False)
        self.last.bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        x = self.tied(x)
        outside = linear(x, self.called_by_function.weight).mean(1, keepdim=True)
        output: Tensor = self.last(x) + outside
        return output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # A parameter of the root, used outside of its forward.
        return mse_loss(self(x) + self.shift.sum(), y)


class Net(Module):
    def __init__(self, seed: int = 2, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = Network(seed)
        self.losses: list[float] = []
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net.loss(*batch)
        self.losses.append(self.trainer.strategy.ranks.all_reduce(loss.detach()).item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net.loss(*batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output

    def configure_optimizers(self) -> Any:
        if self._optimizer is not None:
            return self._optimizer(self)
        decayed = [p for n, p in self.net.named_parameters() if "bias" not in n]
        rest = [p for n, p in self.net.named_parameters() if "bias" in n]
        groups: Any = [
            {"params": [p for p in decayed if p.requires_grad], "weight_decay": 0.1, "lr": 2e-2},
            {"params": [p for p in rest if p.requires_grad]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": devices,
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **options,
        }
    )
