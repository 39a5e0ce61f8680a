# Run by test_failure.py.
import os
import sys
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.loggers import CSVLogger
from stratagem.strategies import DDPStrategy


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Ready(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            Path(f"rank{trainer.global_rank}").write_text(str(os.getpid()))


class SlowLogger(CSVLogger):
    def finalize(self, status):
        time.sleep(2.0)  # on rank 0 only; the other ranks end meanwhile
        super().finalize(status)


folder = Path("checkpoints")
trainer = Trainer(
    accelerator="cpu",
    devices=int(sys.argv[1]),
    strategy=sys.argv[2],
    logger=SlowLogger("logs") if "slow_logger" in sys.argv else False,
    enable_progress_bar=False,
    max_epochs=-1,
    callbacks=[Ready(), ModelCheckpoint(dirpath=folder, every_n_epochs=100)],
)
loader = DataLoader(TensorDataset(torch.ones(4000, 4)), batch_size=4)
trainer.fit(Net(), loader)
print("NOT REACHED")
