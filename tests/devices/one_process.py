"""What one process does on the simulated device: `python one_process.py FOLDER`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import simulated
import torch
from device_models import Net, error_of, fit, loader, model, on_host, same, steps, trainer
from simulated.accelerator import SimulatedAccelerator
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Trainer
from stratagem.callbacks import Callback
from stratagem.loggers import CSVLogger
from stratagem.precision import MixedPrecision
from stratagem.rng import rng_state, set_rng_state
from stratagem.strategies import DDPStrategy
from stratagem.trainer.metrics import log_buffer as rows

folder = Path(sys.argv[1])
out: dict[str, Any] = {}
accelerator = SimulatedAccelerator()
second = torch.device("sim", 2)
module_of_device: Any = torch.get_device_module("sim")


def lite(**options: Any) -> Lite:
    lite = Lite(**{"accelerator": "sim", "devices": [2], **options})
    lite.launch()
    return lite


def by_hand(lite: Lite, *, early: bool = False) -> tuple[Any, list[float]]:
    """Train with an optimizer that was made before the model was moved."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if early:  # it has state on the host
        net(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    module, wrapped = lite.setup(net, optimizer)
    return net, steps(lite, module, wrapped)


# -- training by hand: an optimizer from before, one with state, tied weights
out["fork before"] = accelerator.fork_problem()
for name, early in (("fresh", False), ("with state", True)):
    net, losses = by_hand(lite(), early=early)
    reference, expected = by_hand(lite(accelerator="cpu", devices=1), early=early)
    out[name] = {
        "differ by": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "trained": losses[0] > losses[-1],
        "device": str(net.first.weight.device),
        "tied": net.first.weight is net.last.weight,
    }

# -- the Trainer: batches, mixed precision
plain = fit(folder)
reference = fit(folder, accelerator="cpu", devices=1)
mixed = fit(folder, precision="bf16-mixed")
pairs = zip(plain.state_dict().values(), reference.state_dict().values(), strict=True)
differences = (
    (a.detach().cpu().double() - b.detach().double()).abs().max().item() for a, b in pairs
)
out["trainer"] = {
    "devices": sorted(plain.devices),
    "differ by": max(differences),
    "dtypes": [sorted(net.net.dtypes) for net in (plain, mixed)],
}
with lite(precision="bf16-mixed").autocast():
    ones = torch.ones(2, 2, device="sim")
    out["lite's autocast"] = str((ones @ ones).dtype)
module_of_device.get_amp_supported_dtype = lambda: [torch.float16]
out["refused"] = error_of(lambda: Lite(accelerator="sim", devices=1, precision="bf16-mixed"))
out["refused object"] = error_of(lambda: trainer(folder, precision=MixedPrecision()))
module_of_device.get_amp_supported_dtype = lambda: [torch.bfloat16]

# -- resuming bit for bit, with numbers drawn on the device
whole = fit(folder, dropout=0.5)
checkpoint = folder / "first.ckpt"
net = Net(0.5)
torch.manual_seed(7)
first = trainer(folder, max_epochs=1)
first.fit(net, loader())
first.save_checkpoint(checkpoint)
torch.rand(7, device=second)
resumed = fit(folder, dropout=0.5, ckpt_path=checkpoint)
out["resumed"] = same(whole.state_dict(), resumed.state_dict())
saved = torch.load(checkpoint, "cpu", weights_only=True)["state_dict"]
out["on the host"] = sorted({str(value.device) for value in saved.values()})

# -- the same under Lite, in the middle of an epoch; in each format


def run(format: str, *, save: bool = False, load: bool = False) -> dict[str, Any]:
    """An epoch by hand, saved after its third step, or from there on."""
    path = folder / f"lite_{format}"
    one = lite(plugins=format)
    torch.manual_seed(7)
    module = model(0.5)
    prepared, optimizer = one.setup(module, torch.optim.Adam(module.parameters(), lr=1e-2))
    batches = one.setup_dataloaders(loader())
    state = {"model": prepared, "optimizer": optimizer, "batches": batches}
    if load:
        torch.rand(7, device=second)
        one.load(path, dict(state))
    steps(
        one, prepared, optimizer, batches, lambda n: one.save(path, state) if save and n == 3 else 0
    )
    one.strategy.checkpoint_io.wait()
    return on_host(module.state_dict())


for format in ("single_file", "directory", "async"):
    unbroken = run(format, save=True)
    out[f"lite resumes, {format}"] = same(unbroken, run(format, load=True))

# -- to the CPU and back
weights = whole.state_dict()
for name, options in (("to", {"accelerator": "cpu", "devices": 1}), ("from", {})):
    one = lite(**options)
    module = one.setup(model())
    one.load(folder / "lite_single_file", {"model": module})
    one.save(folder / "over", {"model": module})
    other = lite(**({} if name == "to" else {"accelerator": "cpu", "devices": 1}))
    loaded = other.setup(model())
    other.load(folder / "over", {"model": loaded})
    out[f"{name} the host"] = (
        same(module.state_dict(), loaded.state_dict()),
        str(next(loaded.parameters()).device),
    )

# -- RNG states: of this device, and of one with another index
state = rng_state(accelerator, second)
drawn = torch.rand(3, device=second)
set_rng_state(state, accelerator, second)
again = torch.rand(3, device=second)
zeroth = torch.device("sim", 0)
set_rng_state(state, accelerator, zeroth)
elsewhere = torch.rand(3, device=zeroth)
set_rng_state({**state, "device": ["other", torch.zeros(3)]}, accelerator, second)
out["rng"] = [drawn.equal(again), drawn.cpu().equal(elsewhere.cpu())]

# -- what is logged: in all of an epoch's steps, and read for the loggers with the epoch's own


class Logging(Net):
    """Logs its loss, for steps and for the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


net = Logging()
logs = CSVLogger(folder / "logs")
logging = Trainer(
    accelerator="sim",
    devices=1,
    max_epochs=3,
    logger=logs,
    log_every_n_steps=1,
    default_root_dir=folder,
    enable_progress_bar=False,
    enable_checkpointing=False,
)
inputs = torch.randn(200, 4)
logging.fit(net, DataLoader(TensorDataset(inputs, inputs), batch_size=2))
losses = [loss.item() for loss in net.losses[-100:]]
out["logged long"] = [
    abs(float(logging.callback_metrics["loss_epoch"]) - sum(losses) / len(losses)),
    len((Path(logs.log_dir) / "metrics.csv").read_text().splitlines()),
]


# -- what a step waits for: each of 40, with values logged and shown, clipping and a scheduler
def waits_of_steps() -> list[tuple[int, int, int]]:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[simulated.Counts] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(simulated.counts())

    rows._SECONDS = 0.0  # values leave for the logger at each step, and not every two seconds
    watch = Watch()
    trainer(
        folder / "waits",
        callbacks=watch,
        logger=CSVLogger(folder / "waits"),
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        max_epochs=10,
    ).fit(Logs(), loader(6))
    return [
        (
            after.synchronizations - before.synchronizations,
            after.blocking_host_to_device - before.blocking_host_to_device,
            after.recorded_streams - before.recorded_streams,
        )
        for before, after in zip(watch.seen, watch.seen[1:], strict=False)
    ]


out["waits"] = waits_of_steps()
(logged,) = (folder / "waits").rglob("metrics.csv")
out["logged"] = logged.read_text().splitlines()

# -- what else an accelerator says
module = lite().setup(torch.nn.Linear(256, 256))
out["stats"] = accelerator.device_stats(second)
out["fork after"] = error_of(
    lambda: Lite(accelerator="sim", devices=2, strategy=DDPStrategy(launcher="fork")).launch(print)
)
out["host"] = [accelerator.is_host, accelerator.pins_memory]
counts = simulated.counts()
accelerator.synchronize(second)
out["synchronized"] = simulated.counts().synchronizations - counts.synchronizations
print(json.dumps(out))
