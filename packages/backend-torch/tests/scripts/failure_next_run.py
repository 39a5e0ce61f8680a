# Run by test_failure.py: a script catches the errors of rank 1's runs, and starts the next ones.
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem_torch.distributed import runs

runs._GRACE = 1.0
RANK = int(os.environ.get("RANK", 0))
TRIALS = [
    *(("ddp", "training_step"), ("fsdp", "validation_step"), ("fsdp", "setup")),
    *(("ddp", "configure_optimizers"), ("ddp", "on_fit_end"), ("ddp", "before"), ("ddp", "after")),
    *(("ddp", "everywhere"), ("ddp", "again"), ("ddp", "interrupt"), ("ddp", "everywhere late")),
    ("ddp", "validate"),
]
if sys.argv[1:] == ["stuck"]:
    # As on a system where the connections cannot be closed.
    runs.close_connections, runs._PATIENCE = bool, 0.2
    TRIALS = TRIALS[:1]
elif sys.argv[1:]:
    TRIALS = [(sys.argv[1], "training_step")]


class Net(Module):
    def __init__(self, fails_in):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        self.fails_in = fails_in

    def fail(self, where):
        if self.fails_in == "interrupt" and RANK == 1 and where == "training_step":
            raise KeyboardInterrupt
        if self.fails_in == "everywhere late" and RANK == 1:
            time.sleep(2.5)  # rank 0 has closed its connections by then
        if self.fails_in.startswith("everywhere") or (self.fails_in == where and RANK == 1):
            raise ValueError(f"fails in {self.fails_in}")

    def setup(self, stage):
        self.fail("setup")

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.fail("training_step")
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.fail("validation_step")
        self.fail("validate")
        self.log("value", self.net(batch).mean())

    def on_fit_end(self):
        self.fail("on_fit_end")

    def configure_optimizers(self):
        self.fail("configure_optimizers")
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(samples):
    return DataLoader(torch.ones(samples, 3), 2)


def fit(strategy, fails_in):
    global trainer
    if fails_in != "again":  # else the Trainer of the run before, whose model was used
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
    model = Net(fails_in)
    if fails_in == "before":
        model.fail("before")
    # Rank 1 has a batch less in validation: rank 0 waits for it there, in no collective.
    if fails_in == "validate":
        trainer.validate(model, loader(17), verbose=False)
    trainer.fit(model, loader(16), loader(17))
    if fails_in == "after":
        model.fail("after")
    return trainer.global_step


found = []
trials = [each for kind in TRIALS for each in (kind, (kind[0], ""))]
if RANK == 0 and not sys.argv[1:]:
    trials.append(("ddp", ""))
for trial in trials:
    began = time.monotonic()
    try:
        said = fit(*trial)
    except (Exception, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    found.append([*trial, said, time.monotonic() - began])
Path(f"rank{RANK}").write_text(json.dumps(found))
