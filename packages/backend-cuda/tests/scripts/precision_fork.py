"""A model is quantised and tuned in forked processes; then it is evaluated in this one."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem_cuda.precision import BitsandbytesPrecision


class Tuned(Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)
        self.evaluated = 0

    def training_step(self, batch, batch_idx):
        return self.head(self.base(batch)).float().square().mean()

    def test_step(self, batch, batch_idx):
        self.evaluated += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


torch.set_num_threads(1)
options = {
    "accelerator": "cpu",
    "plugins": BitsandbytesPrecision("nf4", ignore_modules={"head"}),
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}
model = Tuned()
before = model.head.weight.clone()
data = DataLoader(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)), batch_size=4)
Trainer(strategy="ddp_fork", devices=1, max_steps=2, **options).fit(model, data)
Trainer(**options).test(model, data, verbose=False)
out = {
    "kind": str(model.base.weight.dtype).partition(".")[2],
    "has trained": not torch.equal(before, model.head.weight),
    "evaluated": model.evaluated,
}
print(json.dumps(out))
