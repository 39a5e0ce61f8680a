"""What a training step of a compiled model costs, beside raw eager and raw torch.compile.

    python benchmarks/compiled_model.py [cpu | cuda] [--rounds 5] [--steps 500]

A tiny MLP (32-64-64-2), batch 4, AdamW, one thread. Every variant runs in every round, in an order
that changes; compiling is done before the clock starts. A figure is the median over rounds of the
wall time of a step, in microseconds, with the smallest, and the ratio to raw eager of the same
round. On a GPU the clock waits for the device at its start and its end only.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stratagem import Module, Trainer

WARM_UP = 20


class Clocked(Dataset[Tensor]):
    """The same batch again and again; notes the time when the first and the last are read."""

    def __init__(self, steps: int, device: str) -> None:
        self.steps, self.device = steps, device
        self.batch = torch.randn(4, 32, device=device)
        self.began = self.ended = 0.0

    def __len__(self) -> int:
        return WARM_UP + self.steps + 1

    def __getitem__(self, index: int) -> Tensor:
        if index == WARM_UP:
            self.began = self.now()
        elif index == WARM_UP + self.steps:
            self.ended = self.now()
        return self.batch

    def now(self) -> float:
        if self.device != "cpu":
            torch.accelerator.synchronize()
        return perf_counter()

    def microseconds(self) -> float:
        return (self.ended - self.began) / self.steps * 1e6


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def raw(steps: int, device: str, *, model: bool = False, optimizer: bool = False) -> float:
    """Raw PyTorch, with torch.compile of the model and of the optimizer's step where asked."""
    torch.compiler.reset()
    data = Clocked(steps, device)
    net = network().to(device)
    stepper = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=device != "cpu")
    called: Any = torch.compile(net) if model else net
    step: Any = torch.compile(stepper.step) if optimizer else stepper.step
    for batch in DataLoader(data, batch_size=None):
        loss = called(batch).square().mean()
        stepper.zero_grad()
        loss.backward()
        step()
    return data.microseconds()


def trainer(steps: int, device: str, **arguments: Any) -> float:
    torch.compiler.reset()
    data = Clocked(steps, device)
    Trainer(
        accelerator=device,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    ).fit(Net(), DataLoader(data, batch_size=None))
    return data.microseconds()


VARIANTS: dict[str, Callable[[int, str], float]] = {
    "raw PyTorch, eager": raw,
    "raw PyTorch, torch.compile(model)": lambda s, d: raw(s, d, model=True),
    "raw PyTorch, model and optimizer.step": lambda s, d: raw(s, d, model=True, optimizer=True),
    "Trainer": trainer,
    "Trainer(compile=True)": lambda s, d: trainer(s, d, compile=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rounds: list[dict[str, float]] = []
    names = list(VARIANTS)
    for _ in range(arguments.rounds):
        random.shuffle(names)
        rounds.append({n: VARIANTS[n](arguments.steps, arguments.device) for n in names})

    print(f"{arguments.device}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| variant | us a step | smallest | over raw eager |\n|---|---|---|---|")
    for name in VARIANTS:
        times = [r[name] for r in rounds]
        ratio = statistics.median(r[name] / r["raw PyTorch, eager"] for r in rounds)
        print(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
