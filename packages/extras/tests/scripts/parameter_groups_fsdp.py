"""Three steps with parameter groups: in a loop, into loop.pt, and under fsdp: `... OUT`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem_extras.parameter_groups import parameter_groups


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        rules = {"*.bias": {"weight_decay": 0.0}}
        return torch.optim.AdamW(parameter_groups(self, rules, lr=0.1, layer_decay=0.5))


if __name__ == "__main__":
    module, expected = Net(), Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fsdp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data: Any = torch.ones(24, 2)
    trainer.fit(module, DataLoader(data, 4))
    state = trainer.strategy.model_state(trainer.run.require_prepared())
    if trainer.is_global_zero:
        optimizer = expected.configure_optimizers()
        for _ in range(3):
            optimizer.zero_grad()
            expected.training_step(torch.ones(4, 2), 0).backward()
            optimizer.step()
        torch.save(expected.state_dict(), "loop.pt")
        torch.save(state, sys.argv[1])
