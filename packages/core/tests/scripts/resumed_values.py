# Run by test_resumed_values.py: DEVICES FOLDER CHECKPOINT.
import json
import sys
from pathlib import Path

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint


class Net(Module):
    """The learning rate is 0, so that a sample has one loss, whichever rank reads it."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        losses = (self.net(batch.unsqueeze(1).float() / 24) - 1).square().flatten()
        loss = losses.mean()
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("sum", losses.detach().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", losses.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("own", loss, on_step=False, on_epoch=True, sync_dist=False)
        self.log("median", loss, on_step=False, on_epoch=True, reduce_fx=torch.median)
        self.metric.update(losses.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "mean"}]


class Values(Callback):
    runs_after_metrics = True

    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        values = trainer.callback_metrics
        self.epochs.append({name: float(value) for name, value in sorted(values.items())})


devices, folder, ckpt_path = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(7)
values, stops = Values(), EarlyStopping("mean", patience=5)
saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
trainer = Trainer(
    accelerator="cpu",
    devices=devices,
    strategy="ddp" if devices > 1 else "single_device",
    logger=False,
    enable_progress_bar=False,
    max_epochs=2,
    callbacks=[values, stops, saver],
)
net = Net()
samples = torch.arange(20)
trainer.fit(net, DataLoader(samples, batch_size=2, shuffle=True), ckpt_path=ckpt_path or None)
state = trainer.run.schedulers.state()
result = {"epochs": values.epochs, "plateau": state, "stops": stops.state_dict()}
(folder / f"{trainer.global_rank}.json").write_text(json.dumps(result))
