"""What the tests of fsdp run on each rank; a module of its own, since scripts import it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
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
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(x)))
        return output


class Network(nn.Module):
    """Blocks, parameters of its own: without a dimension or elements, frozen, never used."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(3))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(4))
        self.blocks[1].requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x) * self.scale
        return output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # Uses a parameter of the root outside of its forward, and before it.
        shift = self.shift.sum() + self.empty.sum()
        return mse_loss(self(x) + shift, y)


def mlp() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), Block(8), nn.Linear(8, 1))


def early(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps in one process, before anything is sharded."""
    inputs, targets = data(8).tensors
    for _ in range(3):
        torch.autograd.backward(mse_loss(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


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
        net = self.net
        decayed = [net.first.weight, *net.blocks.parameters()]
        rest: list[Tensor] = [
            net.first.bias,
            *net.last.parameters(),
            net.scale,
            net.shift,
            net.unused,
        ]
        groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": rest}]
        optimizer = torch.optim.Adam(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": devices,
            "max_steps": STEPS,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **options,
        }
    )


def train(strategy: Any, ranks: int = 1, shards: int | None = None) -> tuple[Trainer, Net]:
    """Train for 20 steps with accumulation and clipping, then validate.

    Ranks that share a part of the data make fewer shards than there are ranks.
    """
    module, parts = Net(), shards or ranks
    runs = trainer(strategy, ranks)
    runs.fit(module, loader(parts), loader(parts, samples=24))
    return runs, module


def messages(actions: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, str]]:
    """Yield what each action, which must fail, says."""
    for name, action in actions.items():
        try:
            action()
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, "nothing was raised"
