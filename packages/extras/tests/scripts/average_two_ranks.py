# Run by test_average_two_ranks.py, on two ranks.
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EMAWeightAveraging

inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.validated = []

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        # The forward of the average, by all ranks.
        self.validated.append(float(self.net(batch[0]).sum()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(strategy, devices, **options):
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", strategy=strategy, devices=devices, **plain, **options)


net = Net()
data = DataLoader(TensorDataset(inputs), 4)
ema = EMAWeightAveraging(decay=0.8)
one = trainer("fsdp", 2, callbacks=ema, max_epochs=2, num_sanity_val_steps=0)
one.fit(net, data, data)
one.save_checkpoint("fsdp.ckpt", weights_only=True)
validated = sum(map(sum, zip(*one.ranks.gather_objects(net.validated), strict=True)))


class Saves(Callback):
    """Saves within the run, where the weights are not the average."""

    def __init__(self, name):
        self.name = name

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.name)


for form in ("single_file", "directory"):
    callbacks = [EMAWeightAveraging(decay=0.8), Saves(f"{form}.ckpt")]
    trainer("fsdp", 2, callbacks=callbacks, max_epochs=2, plugins=form).fit(Net(), data, data)


class SavesInValidation(Callback):
    """Saves where the weights are the average."""

    def on_validation_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            trainer.save_checkpoint("validation.ckpt")


def weights(trainer, name):
    trainer.save_checkpoint(name)
    saved = torch.load(name, weights_only=True) if trainer.is_global_zero else {}
    return {key: saved.get(key, {}) for key in ("state_dict", "current_model_state")}


differences = {}
for strategy in ("fsdp", "ddp_sharded"):
    options = {"num_sanity_val_steps": 0}
    whole = trainer(strategy, 2, callbacks=EMAWeightAveraging(decay=0.8), max_epochs=2, **options)
    whole.fit(Net(), data, data)
    expected = weights(whole, "whole.ckpt")
    callbacks = [EMAWeightAveraging(decay=0.8), SavesInValidation()]
    cut = trainer(strategy, 2, callbacks=callbacks, max_epochs=1, **options)
    cut.fit(Net(), data, data)
    cut.save_checkpoint("after.ckpt")
    for name in ("validation.ckpt", "after.ckpt"):
        ema = EMAWeightAveraging(decay=0.8)
        resumed = trainer(strategy, 2, callbacks=ema, max_epochs=2, **options)
        resumed.fit(Net(), data, data, ckpt_path=name)
        differences[f"{strategy} {name}"] = {
            key: max(
                (float((value - saved[n]).abs().max()) for n, value in expected[key].items()),
                default=-1.0,
            )
            for key, saved in weights(resumed, "resumed.ckpt").items()
        }

if one.is_global_zero:
    Path("differences.json").write_text(json.dumps(differences))
    Path("validated.json").write_text(json.dumps(validated))
