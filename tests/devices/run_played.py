"""What the accelerators mps and xpu do in one process: `python run_played.py FOLDER NAME`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import played
import torch
from device_models import Net, error_of, fit, loader, same
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Trainer
from stratagem.callbacks import DeviceStatsMonitor
from stratagem.loggers import CSVLogger

folder, name = Path(sys.argv[1]), sys.argv[2]
accelerator = getattr(played, name)()
device = accelerator.device(0)
out: dict[str, Any] = {}
on_device = {"accelerator": accelerator, "devices": 1}

# -- numbers, compared with the CPU's
reference = fit(folder, accelerator="cpu", devices=1)
plain = fit(folder, **on_device)
mixed = fit(folder, precision="bf16-mixed", **on_device)
pairs = zip(plain.state_dict().values(), reference.state_dict().values(), strict=True)
out["differ by"] = max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)
out["devices"] = sorted(plain.devices)
out["dtypes"] = [sorted(net.net.dtypes) for net in (plain, mixed)]

# -- a run with dropout, saved after its first epoch and resumed
whole = fit(folder, dropout=0.5, **on_device)
net = Net(0.5)
torch.manual_seed(7)
options: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False}
first = Trainer(**on_device, max_epochs=1, default_root_dir=folder, logger=False, **options)
first.fit(net, loader())
first.save_checkpoint(folder / "first.ckpt")
torch.rand(7, device=device)
resumed = fit(folder, dropout=0.5, ckpt_path=folder / "first.ckpt", **on_device)
out["resumed"] = same(whole.state_dict(), resumed.state_dict())


# -- values of 100 steps, logged with the memory of the device
class Logging(Net):
    """Logs its loss, for steps and for the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


net = Logging()
logs = CSVLogger(folder / "logs")
trainer = Trainer(
    **on_device,
    max_epochs=1,
    logger=logs,
    log_every_n_steps=1,
    callbacks=DeviceStatsMonitor(),
    default_root_dir=folder,
    **options,
)
inputs = torch.randn(200, 4)
trainer.fit(net, DataLoader(TensorDataset(inputs, inputs), batch_size=2))
losses = [loss.item() for loss in net.losses]
out["logged differ by"] = abs(
    float(trainer.callback_metrics["loss_epoch"]) - sum(losses) / len(losses)
)
out["logged"] = (Path(logs.log_dir) / "metrics.csv").read_text().partition("\n")[0]

# -- memory that is full
torch.ops.simulated.limit_memory(2**24, 0)


class Full(Net):
    """Takes more memory than there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty(2**24, device=device)
        return super().training_step(batch, batch_idx)


def fit_full() -> None:
    full = Trainer(**on_device, max_epochs=1, default_root_dir=folder, logger=False, **options)
    full.fit(Full(), loader())


out["full"] = error_of(fit_full)
out["other device"] = error_of(lambda: accelerator.setup_device(torch.device("cpu")))
out["second"] = error_of(lambda: accelerator.setup_device(accelerator.device(1)))
out["float64"] = error_of(lambda: torch.zeros(1, dtype=torch.float64, device=device))
print(json.dumps(out))
