# Run by test_goodput.py: ranks, of which some sleep. `stragglers.py STRATEGY RANKS SLEEPING`
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.callbacks import Goodput
from stratagem.loggers import CSVLogger

name, count, sleeping = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Net(Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, batch):
        hidden = torch.relu(self.up(batch))
        # All ranks take some time, so that the noise of a busy machine is small beside it.
        time.sleep(0.03)
        if sleeping in ("all", str(self.trainer.global_rank)):
            time.sleep(0.06)
        return self.down(hidden)

    def training_step(self, batch):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


strategy = name
if name == "mesh":
    from stratagem.strategies import MeshStrategy

    strategy = MeshStrategy(shard=2, tensor=2, tensor_plan={"up": "colwise", "down": "rowwise"})
trainer = Trainer(
    accelerator="cpu",
    devices=count,
    strategy=strategy,
    max_steps=30,
    callbacks=Goodput(compare_ranks_every=7),
    logger=CSVLogger(".", name="", version="logs"),
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Net(), DataLoader(torch.randn(4 * 30 * count, 8), 4))
