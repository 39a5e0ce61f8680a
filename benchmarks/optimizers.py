"""Measures Muon's step on several ranks, and the memory of steps within backward.

    python benchmarks/optimizers.py muon --strategy fsdp --ranks 2
    python benchmarks/optimizers.py memory

`muon` prints the median time of a step of rank 0, beside torch's Muon. `memory` prints the bytes of
tensors at the maximum of a step, with the callback and without, by the meter of `stratagem plan`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import OptimizerInBackward
from stratagem_extras.optimizers import Muon
from stratagem_extras.planner.meter import MemoryMeter


def layers(width: int, count: int) -> nn.Module:
    """Return matrices of a decoder's shapes."""
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(width, 4 * width, bias=False), nn.GELU()]
        parts += [nn.Linear(4 * width, width, bias=False)]
    return nn.Sequential(*parts)


def time_muon(options: argparse.Namespace) -> None:
    """Print the time of a step."""
    logging.disable(logging.WARNING)
    lite: Any = Lite(accelerator="cpu", devices=options.ranks, strategy=options.strategy)
    lite.launch()
    batch = torch.randn(8, options.width)
    found = {}
    for name in ("ours", "torch"):
        torch.manual_seed(0)
        model = layers(options.width, options.layers)
        parameters = list(model.parameters())
        groups = [{"params": parameters, "muon": True}]
        made: Any = Muon(groups) if name == "ours" else torch.optim.Muon(parameters)
        model, optimizer = lite.setup(model, made)
        seconds = []
        for _ in range(options.steps):
            lite.backward(model(batch).square().mean())
            lite.strategy.ranks.barrier()
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            optimizer.zero_grad()
        found[name] = statistics.median(seconds[1:])
    if lite.is_global_zero:
        ours, torchs = found["ours"], found["torch"]
        print(f"{options.strategy}, {options.ranks} ranks: {ours:.3f} s, torch's {torchs:.3f} s")


class Net(Module):
    """Matrices that are trained."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.net = layers(width, count)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Meter(Callback):
    """Counts the tensors of the second step."""

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> int | None:
        if batch_idx == 1:
            (optimizer,) = trainer.run.require_prepared().optimizers
            self.meter = MemoryMeter()
            self.meter.__enter__()
            self.meter.add(module.parameters())
            for entry in optimizer.state.values():
                self.meter.add(entry.values())
        return None

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            self.meter.__exit__(None, None, None)


def memory(options: argparse.Namespace) -> None:
    """Print the most bytes of tensors in a step."""
    for callbacks in ([], [OptimizerInBackward()]):
        meter = Meter()
        trainer = Trainer(
            accelerator="cpu",
            max_steps=2,
            callbacks=[meter, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        data: Any = torch.randn(16, options.width)
        trainer.fit(Net(options.width, options.layers), DataLoader(data, 8))
        name = "in backward" if callbacks else "after backward"
        print(f"{name}: {meter.meter.peak / 1e6:.1f} MB")


def main() -> None:
    """Run one of the two."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("muon", "memory"))
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    (time_muon if options.what == "muon" else memory)(options)


if __name__ == "__main__":
    main()
