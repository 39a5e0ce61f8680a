"""Goes on from a Trainer's checkpoint: `python go_on.py STRATEGY CHECKPOINT FOLDER`.

Prints the losses of a second epoch as JSON. Each rank reads all data, so that numbers are the same
for any number of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from xla_models import Net, loader, numbers, trainer

strategy, checkpoint, folder = sys.argv[1:]
ranks = {"accelerator": "cpu", "devices": 2} if strategy == "ddp" else {}
one = trainer(strategy, Path(folder), max_epochs=2, use_distributed_sampler=False, **ranks)
net = Net()
one.fit(net, loader(), ckpt_path=checkpoint)
if one.is_global_zero:
    print("RESULT" + json.dumps(numbers(net.losses)))
