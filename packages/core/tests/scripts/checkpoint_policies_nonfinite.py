# Run by test_checkpoint_policies.py: the weights of one rank of two are not finite.
import sys
import warnings
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint


class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Breaks(Callback):
    # Before ModelCheckpoint, which comes after all others.
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            weight = module.net[1].weight
            with torch.no_grad():
                getattr(weight, "_local_tensor", weight).fill_(float("nan"))


saver = ModelCheckpoint("run", "{step}", every_n_train_steps=1, save_last=True)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=sys.argv[1],
    plugins=sys.argv[2],
    logger=False,
    enable_progress_bar=False,
    max_steps=3,
    callbacks=[Breaks(), saver],
)
data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer.fit(Net(), data)
told = [str(one.message) for one in caught if "finite" in str(one.message)]
kept = [Path(path).name for path in saver.kept_paths]
Path(f"rank{trainer.global_rank}").write_text(repr((told, kept)))
