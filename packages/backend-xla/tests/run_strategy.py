"""Everything that is compared between strategies: `python run_strategy.py STRATEGY FOLDER`.

Prints JSON. Under XLA it is a process of its own, since a runtime cannot be started twice in one.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from xla_models import (
    Net,
    by_hand,
    error_of,
    fit,
    lite_of,
    loader,
    numbers,
    trainer,
)

from stratagem import Callback
from stratagem.loggers import CSVLogger

warnings.filterwarnings("ignore", message=".*num_workers.*")
strategy, folder = sys.argv[1], Path(sys.argv[2])
under_xla = strategy != "single_device"
out: dict[str, Any] = {}
KEYS = ("exp_avg", "exp_avg_sq")


def count(name: str) -> int:
    """Return how often torch_xla did something, such as compile."""
    import torch_xla.debug.metrics as metrics

    found = metrics.metric_data(name)
    return int(found[0]) if found else 0


class Counts(Callback):
    """Notes after each step how much was compiled and read from the device so far."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.read: list[int] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.compiled.append(count("CompileTime"))
        self.read.append(count("TransferFromDeviceTime"))


# -- one program a step; first, before anything is compiled
if under_xla:
    counts, net = Counts(), Net()
    long = trainer(
        strategy,
        folder,
        max_epochs=2,
        logger=CSVLogger(folder / "logs"),
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        callbacks=counts,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    long.fit(net, loader(70 * 8), loader(70 * 8))
    rows = (Path(long.log_dir) / "metrics.csv").read_text().splitlines()
    out["graphs"] = {
        "compiled by step": counts.compiled,
        "compiled": count("CompileTime"),
        "read in steps": counts.read[69] - counts.read[0],
        "rows": len(rows),
        "epoch": float(long.callback_metrics["train_epoch"]),
        "mean": sum(numbers(net.losses[70:])) / 70,
    }

# -- the numbers
net = fit(strategy, folder)
out["losses"] = numbers(net.losses)
out["running mean"] = net.norm.running_mean.tolist()  # type: ignore[union-attr]
out["running var"] = net.norm.running_var.tolist()  # type: ignore[union-attr]
options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
out["accumulated, clipped"] = numbers(fit(strategy, folder, max_epochs=2, **options).losses)
options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
out["clipped by value"] = numbers(fit(strategy, folder, **options).losses)
for precision in ("bf16-mixed", "bf16-true"):
    mixed = fit(strategy, folder, precision=precision)
    dtypes = sorted({str(p.dtype) for p in mixed.parameters()})
    out[precision] = {
        "losses": numbers(mixed.losses),
        "computed in": sorted(mixed.dtypes),
        "parameters": dtypes,
    }
out["by hand"], out["by hand, evaluated"] = by_hand(strategy)
uneven = Net()
trainer(strategy, folder).fit(uneven, loader(21))  # a last batch of 5
out["uneven"] = numbers(uneven.losses)
out["validated"] = trainer(strategy, folder).validate(net, loader(), verbose=False)[0]["val"]
predictions = trainer(strategy, folder).predict(
    net, loader(collate_fn=lambda rows: torch.stack([row[0] for row in rows]))
)
out["predicted"] = float(torch.cat([one.cpu() for one in predictions]).double().sum())


class Manual(Net):
    """Steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


out["manual"] = numbers(fit(strategy, folder, Manual()).losses)

# -- what lies where
if strategy == "xla_fsdp":
    import torch_xla

    one = trainer(strategy, folder)
    one.fit(trained := Net(), loader())
    division = torch_xla._XLAC._get_xla_sharding_spec
    out["divided"] = {
        name: [division(value), *(division(one.optimizers[0].state[value][key]) for key in KEYS)]
        for name, value in trained.named_parameters()
    }

# -- checkpoints: names, both formats, back again
for format in ("single_file", "directory"):
    path = folder / f"{strategy}_{format}"
    one = trainer(strategy, folder, plugins=format)
    trained = Net()
    one.fit(trained, loader())
    one.save_checkpoint(path)
    again = fit(strategy, folder, max_epochs=2, ckpt_path=path, plugins=format)
    out[f"resumed, {format}"] = numbers(again.losses)
out["names"] = sorted(net.state_dict()) == sorted(
    torch.load(folder / f"{strategy}_single_file", weights_only=True)["state_dict"]
)
out["two epochs"] = numbers(fit(strategy, folder, max_epochs=2).losses)

# -- in the middle of an epoch, bit for bit, with numbers drawn on the device


def with_dropout(**options: Any) -> Net:
    net = Net(dropout=0.5)
    torch.manual_seed(7)
    ckpt_path = options.pop("ckpt_path", None)
    shuffled = loader(shuffle=True)
    one = trainer(strategy, folder, max_epochs=2, **options)
    one.fit(net, shuffled, ckpt_path=ckpt_path)
    if options.get("max_steps"):
        one.save_checkpoint(folder / "middle.ckpt")
    return net


whole, repeated = with_dropout(), with_dropout()
first = with_dropout(max_steps=4)
torch.manual_seed(99)
resumed = with_dropout(ckpt_path=folder / "middle.ckpt")
out["bit for bit"] = {
    "repeats": numbers(whole.losses) == numbers(repeated.losses),
    "drops": numbers(whole.losses) != out["two epochs"],
    "resumes": numbers(whole.losses) == numbers(first.losses) + numbers(resumed.losses),
    "weights": all(
        torch.equal(one.cpu(), other.cpu())
        for one, other in zip(
            whole.state_dict().values(), resumed.state_dict().values(), strict=True
        )
    ),
}

# -- seeds reach the device
lite = lite_of(strategy)
drawn = []
for _ in range(2):
    lite.seed_everything(5)
    drawn.append(torch.rand(3, device=lite.device).cpu().tolist())
out["seeded"] = drawn[0] == drawn[1]


# -- a dataset that fails


class Failing(Dataset[Any]):
    """Fails in the middle of an epoch."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise ValueError("sample 20 cannot be read")
        return torch.ones(8), torch.ones(3)


for workers in (0, 2):
    batches = torch.utils.data.DataLoader(Failing(), batch_size=8, num_workers=workers)
    out[f"failing, {workers} workers"] = error_of(trainer(strategy, folder).fit, Net(), batches)

# -- what is refused in this process from here on
if under_xla:
    other = "xla" if strategy == "single_xla" else "single_xla"
    os.environ["CPU_NUM_DEVICES"] = "1"  # as the plan sees it; the runtime has read it before
    out["other kind"] = error_of(lambda: trainer(other, folder).fit(Net(), loader()))
print("RESULT" + json.dumps(out))
