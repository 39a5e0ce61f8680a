"""A model with whose checkpoint Lightning and Stratagem go on alike: `lightning_run.py FOLDER`.

Run where Lightning 2.6.6 is installed, it makes `data/lightning_2.6.6.ckpt`: saved by Lightning
in the middle of the second epoch.
"""

import sys

import torch
from torch.utils.data import DataLoader

import lightning.pytorch as pl


class Line(pl.LightningModule):
    def __init__(self, lr=0.1, sizes=(3, 1)):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(*sizes)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.0)

    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch) - 1.0).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader():
    return DataLoader(torch.linspace(-1, 2, 36).reshape(12, 3), batch_size=2)


def trainer(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **options)


if __name__ == "__main__":
    saving = pl.callbacks.ModelCheckpoint(
        sys.argv[1], filename="lightning_2.6.6", every_n_train_steps=9
    )
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=7)
    run = trainer(sys.argv[1], max_epochs=2, callbacks=[saving, stopping])
    run.fit(Line(), loader(), loader())
