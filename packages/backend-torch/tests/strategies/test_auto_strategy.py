"""strategy="auto" divides a model that one rank cannot hold, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import RunScript
from torch import Tensor, nn

from stratagem import Module, Trainer
from stratagem.launch import process
from stratagem.precision import TruePrecision

WIDTH = 500
WEIGHTS = 2 * (WIDTH + 1) * WIDTH * 4
"""Bytes; DDP holds five times as much, with gradients, buckets and an Adam's state."""
SMALL = int(2 * 2.1 * WEIGHTS / 0.9)
"""What both ranks have, of which 2.1 times the weights may be used by each."""


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Whole(TruePrecision):
    shardable = False


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**{"accelerator": "cpu", "devices": 2, "max_steps": 2, **quiet, **options})


def chosen(monkeypatch: pytest.MonkeyPatch, each: float, **options: Any) -> str:
    """Return what is chosen if each of two ranks has this many times the weights' bytes."""
    monkeypatch.setattr(process, "host_memory", lambda: int(2 * each * WEIGHTS / 0.9))
    made = trainer(**options)
    made.runtime.divide(Net())
    assert made.strategy.components.devices == made.plan.devices
    return made.plan.strategy.name


def test_the_least_sharding_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 5.1) == "ddp"
    assert chosen(monkeypatch, 4.1) == "ddp_sharded"
    assert chosen(monkeypatch, 3.1) == "fsdp_shard_grad_op"
    assert chosen(monkeypatch, 2.1) == "fsdp"
    # Offloading to the host frees nothing where the host is the device.
    assert chosen(monkeypatch, 1.5) == "ddp"
    assert chosen(monkeypatch, 2.6, precision="bf16-true") == "ddp"
    assert chosen(monkeypatch, 2.1, precision="bf16-true") == "ddp_sharded"


def test_auto_strategy_keeps_explicit_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 2.1, strategy="ddp") == "ddp"
    assert chosen(monkeypatch, 2.1, devices=1) == "single_device"
    assert chosen(monkeypatch, 2.1, plugins=Whole("32-true")) == "ddp"


def test_plans_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "host_memory", lambda: SMALL)
    made = trainer()
    assert "no strategy named" in made.plan.explain()
    made.runtime.divide(Net())
    reason = "ddp would hold 9.56 MiB without activations, fsdp holds 3.82 MiB, and a rank has "
    assert f"{reason}4.01 MiB" in made.plan.explain()
    assert made.plan.request.strategy == "auto"


SCRIPT = """
import os
import sys

import torch
from stratagem import Module, Trainer
from stratagem.launch import process

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    sizes = [int(size) for size in sys.argv[1:]]
    process.host_memory = lambda: sizes[int(os.environ.get("RANK", 0))]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer, net = Trainer(accelerator="cpu", devices=2, max_steps=2, **quiet), Net()
    trainer.fit(net, torch.utils.data.DataLoader(torch.ones(8, 500), 2))
    trainer.print(trainer.plan.strategy.name, type(next(net.parameters())).__name__)
"""


def test_ranks_train_with_the_strategy_that_fits(run_script: RunScript) -> None:
    assert run_script(SCRIPT, str(SMALL), str(SMALL)).stdout.split() == ["fsdp", "DTensor"]


def test_ranks_that_choose_differently_say_so(run_script: RunScript) -> None:
    failed = run_script(SCRIPT, str(SMALL), str(4 * SMALL), expect=1)
    assert (
        "strategy='auto' chose 'fsdp' on rank 0 and 'ddp' on rank 1, whose device has another "
        "memory: name the strategy"
    ) in failed.stderr
