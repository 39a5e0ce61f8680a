"""Two ranks whose memory holds no gathered layer: `python auto_strategy.py OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stratagem import Module, Trainer
from stratagem.launch import process

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
    use_cache=False,
)


class Net(Module):
    """A model of transformers, which has a plan of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(CONFIG)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**{"accelerator": "cpu", "devices": 2, "max_steps": 3, **quiet, **options})


def weights() -> int:
    return sum(p.numel() * p.element_size() for p in LlamaForCausalLM(CONFIG).parameters())


def memory(each: float) -> int:
    """Return a host's memory of which each of two ranks uses this many times the weights' bytes."""
    return int(2 * each * weights() / 0.9)


if __name__ == "__main__":
    # fsdp holds 2 times the weights, and gathers a layer of a little less than a half.
    small = memory(2.3)
    process.host_memory = lambda: small
    batches = [torch.arange(12).remainder(7 + n).repeat(2, 1) for n in range(3)]
    runs, net = trainer(), Net()
    runs.fit(net, torch.utils.data.DataLoader(batches, batch_size=None))
    if runs.is_global_zero:
        alone, whole = trainer(devices=1, strategy="single_device"), Net()
        alone.fit(whole, torch.utils.data.DataLoader(batches, batch_size=None))
        found = {
            "strategy": runs.plan.strategy.name,
            "why": runs.plan.strategy.why,
            "sizes": runs.strategy.sizes,  # type: ignore[attr-defined]
            "losses": net.losses,
            "whole": whole.losses,
        }
        Path(sys.argv[1]).write_text(json.dumps(found))
