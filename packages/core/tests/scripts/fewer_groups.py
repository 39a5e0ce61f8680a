# Run by test_checkpoint.py.
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import CheckpointMismatchError


class OfLayers(Module):
    """Its optimizer has a group for each of some layers, and a scheduler."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = layers
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        groups = [{"params": self.net[at].parameters(), "lr": 0.1**at} for at in self.layers]
        optimizer = torch.optim.Adam(groups)
        return [optimizer], [StepLR(optimizer, 1)]


def fit(strategy, epochs, layers, path=None):
    folder = Path.cwd() / strategy
    saver = ModelCheckpoint(folder)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1,
        max_epochs=epochs,
        callbacks=saver,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(OfLayers(*layers), [torch.ones(2, 3)] * 4, ckpt_path=path)
    return saver.best_model_path


said = {}
for strategy in sys.argv[1:]:
    path = fit(strategy, 1, (0, 1, 3))
    said[strategy] = [str(path)]
    for fewer in ((0,), (3,)):
        try:
            fit(strategy, 2, fewer, path)
        except CheckpointMismatchError as error:
            said[strategy].append(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, 2, (3, 1, 0), path)
    said[strategy].append([str(one.message) for one in caught])
print(json.dumps(said))
