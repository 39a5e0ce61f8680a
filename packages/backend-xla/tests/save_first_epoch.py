"""Makes a file of tests/data: `python save_first_epoch.py STRATEGY FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from xla_models import Net, loader, trainer

strategy, file, folder = sys.argv[1:]
ranks = {"accelerator": "cpu", "devices": 2} if strategy == "ddp" else {}
one = trainer(strategy, Path(folder), use_distributed_sampler=False, **ranks)
one.fit(Net(), loader())
one.save_checkpoint(file)
