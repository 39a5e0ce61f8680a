# Run by test_callbacks_two_ranks.py, on two ranks.
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Module, Trainer
from stratagem.callbacks import EMAWeightAveraging
from stratagem.data import CombinedLoader

inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
out = {}


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.validated = []

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        # The forward of the average, by all ranks.
        self.validated.append(float(self.net(batch[0]).sum()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(strategy, devices, **options):
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", strategy=strategy, devices=devices, **plain, **options)


net = Net()
data = DataLoader(TensorDataset(inputs), 4)
ema = EMAWeightAveraging(decay=0.8)
one = trainer("fsdp", 2, callbacks=ema, max_epochs=2, num_sanity_val_steps=0)
one.fit(net, data, data)
one.save_checkpoint("fsdp.ckpt", weights_only=True)
out["validated"] = sum(map(sum, zip(*one.ranks.gather_objects(net.validated), strict=True)))


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


out["read"] = {}
for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
    module = Sequential() if mode == "sequential" else Read()
    one = trainer("ddp", 2, max_epochs=1)
    one.fit(module, CombinedLoader(loaders(), mode))
    out["read"][mode] = one.ranks.gather_objects(module.read)

if one.is_global_zero:
    Path("results.json").write_text(json.dumps(out))
