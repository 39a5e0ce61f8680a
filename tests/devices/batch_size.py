"""The search for a batch size on a device whose memory ends; prints the sizes that were tried.

python batch_size.py FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device_models import trainer
from simulated.accelerator import SimulatedAccelerator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module
from stratagem.accelerators import Availability
from stratagem_extras.tuner import Tuner

MEMORY = 8 * 2**20


class WithMemory(SimulatedAccelerator):
    """Knows the memory of its devices, as a GPU does."""

    def availability(self) -> Availability:
        return replace(super().availability(), memory=MEMORY)


class Wide(Module):
    """Each sample takes 32 KiB of activations, and some more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1)
        )
        self.tried: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tried.append(len(batch[0]))
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4000, 8)), self.batch_size)


model = Wide()
one = trainer(Path(sys.argv[1]), devices=[0], accelerator=WithMemory())
torch.ops.simulated.limit_memory(MEMORY, 0)
given_back: list[int] = []
of_device: Any = torch.get_device_module("sim")
of_device.empty_cache = lambda: given_back.append(len(model.tried))
found = Tuner(one).scale_batch_size(model, steps_per_trial=1)
print(json.dumps({"found": found, "tried": model.tried, "given back": given_back}))
