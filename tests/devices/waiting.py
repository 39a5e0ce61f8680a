"""What steps of two ranks wait for, under ddp and fsdp: `python waiting.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import simulated
import torch
import torch.distributed as dist
from device_models import Net, fit, loader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import DeviceStatsMonitor, EarlyStopping, ModelCheckpoint
from stratagem.loggers import CSVLogger
from stratagem.trainer.loops import interruption
from stratagem.trainer.metrics import log_buffer as rows

folder = Path(sys.argv[1])
rows._SECONDS = 0.0  # values leave for the logger at each step, and not every two seconds
interruption._EVERY = 0.0  # and the ranks look for signals after each


class Logs(Net):
    """Logs and shows its loss; steps a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watch(Callback):
    """Notes what was counted by the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[simulated.Counts] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        self.seen.append(simulated.counts())


def waits(strategy: str, accumulate: int) -> list[int]:
    """Return the waits between the ends of two batches, of epochs of six batches each."""
    watch = Watch()
    trainer = Trainer(
        accelerator="sim",
        devices=[1, 3],
        strategy=strategy,
        max_epochs=3,
        logger=CSVLogger(folder / strategy),
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        callbacks=[
            watch,
            DeviceStatsMonitor(),
            EarlyStopping("loss_epoch", patience=9),
            ModelCheckpoint(monitor="loss_epoch"),
        ],
    )
    trainer.fit(Logs(), loader(2))
    pairs = zip(watch.seen, watch.seen[1:], strict=False)
    return [after.synchronizations - before.synchronizations for before, after in pairs]


out: dict[str, Any] = {f"{s}, {k}": waits(s, k) for s in ("ddp", "fsdp") for k in (1, 2)}
on_devices = fit(folder, accelerator="sim", devices=[1, 3], strategy="fsdp")
on_host = fit(folder, accelerator="cpu", devices=2, strategy="ddp")
out["losses"] = [torch.stack(net.losses).tolist() for net in (on_devices, on_host)]
(folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(out))
