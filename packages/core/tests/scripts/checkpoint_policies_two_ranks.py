# Run by test_checkpoint_policies.py.
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.strategies import ProcessGroupRanks
from stratagem.trainer.loops import interruption


class Net(Module):
    first = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if self.first is None:
            self.first = self.global_step
        # Clocks of the ranks differ by 0.3 s, and a step takes 0.1 s.
        global now
        now += 0.1
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


now = 0.3 * int(os.environ.get("LOCAL_RANK", 0))
interruption.time = SimpleNamespace(monotonic=lambda: now)


class Counts(Callback):
    def __init__(self):
        self.in_steps, self.before = [], None

    def on_train_batch_start(self, trainer, *args):
        self.end_step()
        self.before = sends

    def on_train_epoch_end(self, trainer, *args):
        self.end_step()

    def end_step(self):
        # A ModelCheckpoint is called after this in each hook.
        if self.before is not None:
            self.in_steps.append(sends - self.before)
        self.before = None


sends = 0
broadcast = ProcessGroupRanks.broadcast


def counting(*args, **kwargs):
    global sends
    sends += 1
    return broadcast(*args, **kwargs)


ProcessGroupRanks.broadcast = counting
verified = []


class Noting(SingleFileCheckpointIO):
    def verify_checkpoint(self, path):
        verified.append(Path(path).name)
        super().verify_checkpoint(path)


def trainer(steps):
    counts = Counts()
    saver = ModelCheckpoint(
        "saved",
        "{step}",
        train_time_interval=timedelta(seconds=2),
        save_top_k=-1,
        save_last=True,
        save_on_exception=True,
    )
    made = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_steps=steps,
        callbacks=[saver, counts],
        plugins=Noting(),
    )
    return made, saver, counts


data = DataLoader(TensorDataset(torch.ones(400, 2)), batch_size=1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    first, saver, counts = trainer(100)
    first.fit(Net(), data)
texts = [str(w.message) for w in told if "save_on_exception" in str(w.message)]
steps = sorted(int(Path(p).stem.removeprefix("step=")) for p in saver.best_k_models)
newest = Path("saved", f"step={steps[-1]}.ckpt")
if first.is_global_zero:
    newest.write_bytes(newest.read_bytes()[:-10])
first.strategy.ranks.barrier()
verified.clear()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    second, *_ = trainer(101)
    model = Net()
    second.fit(model, data, ckpt_path="last")
over = [str(w.message) for w in told if "passed over" in str(w.message)]
free = sum(count == 0 for count in counts.in_steps)
Path(f"rank{first.global_rank}").write_text(
    repr((steps, free, len(counts.in_steps), texts, model.first, len(over), verified))
)
