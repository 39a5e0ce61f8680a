"""What becomes of batches whose copies are delayed: `python in_flight.py FOLDER`; prints JSON.

On the simulated device, where a copy from pinned memory is done only once it is waited for.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import simulated
import torch
from device_models import Net, same
from simulated.accelerator import SimulatedAccelerator
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.data.pytree import move_to_device

# torch 2.9's own DataLoader passes what its own pin_memory calls deprecated.
warnings.filterwarnings("ignore", "The argument 'device' of Tensor", DeprecationWarning)
folder = Path(sys.argv[1])
out: dict[str, Any] = {}
BATCHES = 6
"""In an epoch; each is two tensors."""


def pinned() -> DataLoader[Any]:
    inputs = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(inputs, inputs.roll(1, 1))
    return DataLoader(data, batch_size=4, shuffle=True, pin_memory=True)


class Watch(Callback):
    """Notes how many copies are under way when a step begins, and when it has ended."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.after: list[int] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.before.append(simulated.transfers().pending)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.after.append(simulated.transfers().pending)


class Stops(Callback):
    """Ends training by a signal that comes while the copies of a batch are under way."""

    pending = 0

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == BATCHES + 2:
            self.pending = simulated.transfers().pending
            signal.raise_signal(signal.SIGTERM)


def train(*callbacks: Callback, accelerator: Any = "sim", ckpt_path: Any = None) -> Net:
    net = Net(dropout=0.5)
    torch.manual_seed(7)
    Trainer(
        accelerator=accelerator,
        devices=[2],
        max_epochs=2,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
    ).fit(net, pinned(), ckpt_path=ckpt_path)
    return net


def losses(net: Net) -> list[float]:
    values: list[float] = torch.stack(net.losses).tolist()
    return values


# -- the numbers of a device that copies at once
simulated.load()
at_once = train()
torch.ops.simulated.delay_copies()

# -- ours: what overlaps, what is in flight, what is handed out again
watch = Watch()
whole = train(watch)
transfers = simulated.transfers()
out["same losses"] = losses(whole) == losses(at_once)
out["in flight"] = {"before": watch.before, "after": watch.after, "most": transfers.most_pending}
out["overlapping"] = transfers.overlapping
out["unsafe frees"] = transfers.unsafe_frees


# -- movers that leave one thing out
def mover(
    device: torch.device, *, waits: bool = True, records: bool = True
) -> Callable[[Any], Any]:
    stream = torch.Stream(device)

    def move(batch: Any) -> Any:
        computing = torch.accelerator.current_stream(device)
        with stream:
            moved = move_to_device(batch, device)
        if waits:
            computing.wait_stream(stream)
        if records:
            for tensor in moved:
                tensor.record_stream(computing)
        return moved

    return move


def trained_with(make: Callable[[torch.device], Callable[[Any], Any]]) -> dict[str, Any]:
    """Train with another mover; what differs then."""

    class Careless(SimulatedAccelerator):
        def batch_mover(self, device: torch.device) -> Callable[[Any], Any]:
            return make(device)

    before = simulated.transfers()
    net = train(accelerator=Careless())
    after = simulated.transfers()
    return {
        "same losses": losses(net) == losses(whole),
        "overlapping": after.overlapping - before.overlapping,
        "unsafe frees": after.unsafe_frees - before.unsafe_frees,
    }


out["careless"] = {
    "whole": trained_with(mover),
    "no wait": trained_with(partial(mover, waits=False)),
    "no record": trained_with(partial(mover, records=False)),
    "one stream": trained_with(lambda device: partial(move_to_device, device=device)),
}

# -- stopped with a batch in flight, and resumed
torch.accelerator.synchronize(2)  # the last copies of the last mover are under way
stops = Stops()
with suppress(SystemExit):
    train(ModelCheckpoint(folder / "stopped"), stops)
(path,) = (folder / "stopped").glob("interrupted-*.ckpt")
resumed = train(ckpt_path=path)
out["stopped"] = {
    "in flight": stops.pending,
    "file": path.name,
    "same losses": losses(resumed) == losses(whole)[BATCHES + 3 :],
    "same weights": same(whole.state_dict(), resumed.state_dict()),
}
print(json.dumps(out))
