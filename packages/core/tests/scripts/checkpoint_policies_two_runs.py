# Run by test_checkpoint_policies.py.
import sys
from pathlib import Path
import locks
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Marked(Module):
    def __init__(self, mark):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Meets(Callback):
    # Both runs are at the same step when they choose its name.
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        print("at a step", flush=True)
        sys.stdin.readline()


saver = ModelCheckpoint("shared", "{step}", every_n_train_steps=1, save_top_k=2, save_last=True)
trainer = Trainer(
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    max_steps=8,
    callbacks=[saver, Meets()],
)
data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1)
trainer.fit(Marked(sys.argv[1]), data)
assert locks.KIND in ("seen", "none", "unseen")
print("kept", sorted(map(str, [*saver.best_k_models, saver.last_model_path])), flush=True)
