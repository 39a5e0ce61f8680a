"""Runs that end by an error of one rank's device: `python failing.py FOLDER HOW DEVICE...`.

HOW is "full": the memory of the device 3 ends in the second step; "lost": the device fails then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from device_models import Net, loader, trainer

from stratagem.loggers import CSVLogger

folder, how, devices = Path(sys.argv[1]), sys.argv[2], [int(index) for index in sys.argv[3:]]


class Failing(Net):
    """Fails in the second step on the device 3."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(512, 512)  # 1 MiB

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        loss += self.large(torch.ones(512, device=self.device)).mean()
        self.log("loss", loss, on_step=True)
        if batch_idx == 1 and self.device.index == 3:
            if how == "lost":
                torch.ops.simulated.lose()
            else:
                torch.ops.simulated.limit_memory(16 * 2**20, 3)
                torch.empty(2**24, device=self.device)
        return loss


trainer(
    folder,
    devices=devices,
    strategy="ddp" if len(devices) > 1 else "auto",
    logger=CSVLogger(folder),
    log_every_n_steps=1,
).fit(Failing(), loader())
