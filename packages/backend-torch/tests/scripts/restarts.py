# Run by test_restarts.py.
import json
import os
import signal
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from stratagem import Callback, Module, Trainer

strategy, name, killed = sys.argv[1], sys.argv[2], "kill" in sys.argv


class Augmented(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((3,), index / 64) + 0.1 * torch.rand(3)


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - 1).square().mean()
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class SaveAndKill(Callback):
    first = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.first is None:
            self.first = trainer.global_step
        if batch_idx % 3 == 1:
            # Within a step of three batches: saved as soon as it is taken.
            trainer.save_checkpoint(f"{name}-step={trainer.global_step + 1}.ckpt")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        within_step = batch_idx == 4 and trainer.global_step == 4
        if first and killed and within_step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


look = SaveAndKill()
trainer = Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    accumulate_grad_batches=3,
    logger=False,
    enable_checkpointing=False,
    callbacks=look,
    enable_progress_bar=False,
)
net = Net()
# A run that was started again gets its random numbers from the checkpoint.
restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
torch.manual_seed(os.getpid() if restarted else 100 + trainer.global_rank)
trainer.fit(net, DataLoader(Augmented(), batch_size=4, shuffle=True))
with open(f"{name}-{trainer.global_rank}.json", "w") as file:
    json.dump([look.first, net.losses], file)
trainer.save_checkpoint(f"{name}.ckpt", weights_only=True)
