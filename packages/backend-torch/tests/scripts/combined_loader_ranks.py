# Run by test_combined_loader_ranks.py, on two ranks.
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.data import CombinedLoader


class Read(Module):
    """Notes what each rank reads in training and in validation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.read = []

    def training_step(self, batch, batch_idx):
        self.read.append([None if part is None else part.tolist() for part in batch])
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sequential(Read):
    def training_step(self, batch, batch_idx):
        self.read.append(batch.tolist())
        return self.weight.sum()


def loaders():
    return [DataLoader(torch.arange(8), 2), DataLoader(torch.arange(100, 104), 2)]


found = {}
for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
    module = Sequential() if mode == "sequential" else Read()
    one = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    one.fit(module, CombinedLoader(loaders(), mode))
    found[mode] = one.ranks.gather_objects(module.read)

if one.is_global_zero:
    Path("results.json").write_text(json.dumps(found))
