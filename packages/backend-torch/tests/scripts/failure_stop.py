# Run by test_failure.py: rank 1 alone stops, in an epoch or at its end.
import sys

import torch
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem_torch.distributed import process_group

process_group._PATIENCE = 0.3


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Stop(Callback):
    def stop(self, trainer):
        trainer.should_stop |= trainer.global_step >= 3 and trainer.global_rank == 1


def stop(self, trainer, *_):
    self.stop(trainer)


setattr(Stop, sys.argv[1], stop)
trainer = Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=3, callbacks=Stop(), logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(torch.randn(16, 3), 2))
print("ENDED")
