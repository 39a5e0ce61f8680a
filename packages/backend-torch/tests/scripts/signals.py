# Run by test_signals.py: rank 1 alone receives SIGTERM in the validation after the last epoch.
import os
import signal

import torch
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("value", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Terminated(Callback):
    def on_validation_start(self, trainer, module):
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def loader():
    return DataLoader(torch.randn(16, 3), 2)


trainer = Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, logger=False,
    enable_progress_bar=False, callbacks=[Terminated(), ModelCheckpoint("saved", every_n_epochs=9)],
)  # fmt: skip
trainer.fit(Net(), loader(), loader())
print("NOT REACHED")
