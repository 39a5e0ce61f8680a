"""What a training step costs over the same step in raw PyTorch.

    python benchmarks/step_time.py [--rounds 30] [--steps 500]

Linear(32, 2), batch 4, SGD, one thread, on the CPU. Each Trainer has one callback with both batch
hooks. Every variant runs in every round, in an order
that changes; a figure is the median over rounds of the difference to the raw loop of the same
round, in microseconds of CPU time a step, with quartiles. Lightning and Accelerate take part where
they are installed.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import ProgressBar
from stratagem.loggers import CSVLogger

WARM_UP = 100


class Clocked(Dataset[Tensor]):
    """The same batch again and again; notes the time when the first and the last are read."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.batch = torch.randn(4, 32)
        self.began = self.ended = 0.0

    def __len__(self) -> int:
        return WARM_UP + self.steps + 1

    def __getitem__(self, index: int) -> Tensor:
        if index == WARM_UP:
            self.began = process_time()
        elif index == WARM_UP + self.steps:
            self.ended = process_time()
        return self.batch

    def microseconds(self) -> float:
        return (self.ended - self.began) / self.steps * 1e6


def loader_of(steps: int) -> tuple[Clocked, DataLoader[Tensor]]:
    data = Clocked(steps)
    return data, DataLoader(data, batch_size=None)


def raw(steps: int) -> float:
    data, loader = loader_of(steps)
    model = nn.Linear(32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in loader:
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return data.microseconds()


class Bare(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Logging(Bare):
    on_epoch = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).sum()
        self.log("loss", loss, on_step=True, on_epoch=self.on_epoch, prog_bar=self.on_epoch)
        return loss


class LoggingMean(Logging):
    on_epoch = True


class BatchHooks(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pass


def trainer(steps: int, module: type[Module] = Bare, **options: Any) -> float:
    data, loader = loader_of(steps)
    arguments: dict[str, Any] = {"logger": False, "enable_progress_bar": False, **options}
    arguments["callbacks"] = [BatchHooks(), *arguments.get("callbacks", [])]
    Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **arguments
    ).fit(module(), loader)
    return data.microseconds()


def trainer_csv(steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return trainer(steps, Logging, logger=CSVLogger(folder))


def trainer_csv_mean_bar(steps: int) -> float:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        bar = ProgressBar(console=console)
        return trainer(
            steps, LoggingMean, logger=CSVLogger(folder), callbacks=[bar], enable_progress_bar=True
        )


def lite(steps: int) -> float:
    data, loader = loader_of(steps)
    front = Lite(accelerator="cpu", devices=1)
    front.launch()
    model = nn.Linear(32, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = front.setup(model, optimizer)
    for batch in front.setup_dataloaders(loader):
        loss = model(batch).sum()
        optimizer.zero_grad()
        front.backward(loss)
        optimizer.step()
    return data.microseconds()


def lightning_variants() -> dict[str, Callable[[int], float]]:
    try:
        import lightning.pytorch as pl
        from lightning.fabric import Fabric
        from lightning.pytorch.callbacks import RichProgressBar
        from lightning.pytorch.loggers import CSVLogger as PeerCSV
    except ImportError:
        return {}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Peer(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, log: bool = False, mean: bool = False) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 2)
            self.logs, self.mean = log, mean

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.layer(batch).sum()
            if self.logs:
                self.log("loss", loss, on_step=True, on_epoch=self.mean, prog_bar=self.mean)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def fit(steps: int, module: Any, **options: Any) -> float:
        data, loader = loader_of(steps)
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            enable_checkpointing=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **options,
        ).fit(module, loader)
        return data.microseconds()

    def bare(steps: int) -> float:
        return fit(steps, Peer(), logger=False, enable_progress_bar=False)

    def csv(steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return fit(steps, Peer(log=True), logger=PeerCSV(folder), enable_progress_bar=False)

    def mean(steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            bar = RichProgressBar()
            return fit(steps, Peer(log=True, mean=True), logger=PeerCSV(folder), callbacks=bar)

    def fabric(steps: int) -> float:
        data, loader = loader_of(steps)
        front = Fabric(accelerator="cpu", devices=1)
        model = nn.Linear(32, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = front.setup(model, optimizer)
        for batch in front.setup_dataloaders(loader):
            loss = model(batch).sum()
            optimizer.zero_grad()
            front.backward(loss)
            optimizer.step()
        return data.microseconds()

    return {
        "Lightning Trainer, bare": bare,
        "Lightning Trainer, log to CSV": csv,
        "Lightning Trainer, log to CSV, epoch mean, bar": mean,
        "Fabric": fabric,
    }


def accelerate_variants() -> dict[str, Callable[[int], float]]:
    try:
        from accelerate import Accelerator
    except ImportError:
        return {}

    def run(steps: int) -> float:
        data, loader = loader_of(steps)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(32, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss = model(batch).sum()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        return data.microseconds()

    return {"Accelerate": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="*", help="names of variants")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    variants: dict[str, Callable[[int], float]] = {
        "raw PyTorch": raw,
        "Trainer, bare": trainer,
        "Trainer, log to CSV": trainer_csv,
        "Trainer, log to CSV, epoch mean, bar": trainer_csv_mean_bar,
        "Lite": lite,
        **lightning_variants(),
        **accelerate_variants(),
    }
    if arguments.only:
        variants = {
            name: v for name, v in variants.items() if name in ("raw PyTorch", *arguments.only)
        }
    for variant in variants.values():
        variant(arguments.steps)
    rounds: list[dict[str, float]] = []
    names = list(variants)
    for _ in range(arguments.rounds):
        random.shuffle(names)
        rounds.append({name: variants[name](arguments.steps) for name in names})

    print(f"raw PyTorch: {statistics.median(r['raw PyTorch'] for r in rounds):.1f} us a step\n")
    print("| variant | us over raw | quartiles |\n|---|---|---|")
    for name in variants:
        if name == "raw PyTorch":
            continue
        low, middle, high = statistics.quantiles([r[name] - r["raw PyTorch"] for r in rounds], n=4)
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} |")


if __name__ == "__main__":
    main()
