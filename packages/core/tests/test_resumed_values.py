"""A resumed run has the values, schedulers and callbacks of the run that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.loggers import Logger


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small wait for their threads most of the time, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Rows(Logger):
    """Keeps rows of epochs; those of single steps are buffered and come as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        raise NotImplementedError

    def log_rows(self, rows: Any) -> None:
        self.rows += [(step, {k: float(v) for k, v in values.items()}) for step, values in rows]


class Net(Module):
    """Logs in each way that there is, and draws random numbers in training and validation.

    Args:
        schedulers: makes them of the optimizer.
        metric: a metric object of the training.
    """

    def __init__(self, schedulers: Any = None, metric: nn.Module | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.schedulers = schedulers
        self.metric = metric
        self.epochs: list[tuple[int, dict[str, float]]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", loss, on_epoch=True, on_step=False, batch_size=batch_idx + 1)
        self.log("sum", float(loss.detach()), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("max", loss, on_epoch=True, reduce_fx="max")
        self.log("min", loss, on_epoch=True, reduce_fx="min")
        self.log("median", loss, on_epoch=True, reduce_fx=torch.median)
        if batch_idx == 0:
            self.log("first", loss, on_epoch=True, reduce_fx=lambda values: values.mean() * 2)
        if self.metric is not None:
            self.metric.update(loss.detach())
            self.log("metric", self.metric, on_epoch=True, on_step=False)
        return torch.as_tensor(loss)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean() + torch.rand(()))

    def on_train_epoch_end(self) -> None:
        values = self.trainer.callback_metrics
        self.epochs.append((self.global_step, {k: float(v) for k, v in values.items()}))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], self.schedulers(optimizer) if self.schedulers else []


def plateau(monitor: str, interval: str = "epoch", **options: Any) -> Callable[[Any], list[Any]]:
    def schedulers(optimizer: Any) -> list[Any]:
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.02, factor=0.7)
        return [
            {"scheduler": scheduler, "monitor": monitor, "interval": interval, "strict": True}
            | options
        ]

    return schedulers


def data(samples: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    points = torch.linspace(0, 1, 2 * samples).reshape(-1, 2)
    return DataLoader(TensorDataset(points), batch_size=batch_size, **options)


class Run:
    """A fit of three epochs that saves each step, its values and its state at the end."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[], Net],
        callbacks: Callable[[Path], list[Callback]],
        ckpt_path: Path | None = None,
        *,
        batches: int = 5,
        **options: Any,
    ) -> None:
        torch.manual_seed(7 if ckpt_path is None else 99)
        self.net, self.rows = make(), Rows()
        self.callbacks = [
            *callbacks(folder / "best"),
            ModelCheckpoint(
                folder / "all", every_n_train_steps=1, save_top_k=-1, filename="{step}"
            ),
        ]
        arguments = {"max_epochs": 3, "num_sanity_val_steps": 0, **options}
        self.trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=self.rows,
            enable_progress_bar=False,
            callbacks=self.callbacks,
            **arguments,
        )
        self.trainer.fit(self.net, data(2 * batches, shuffle=True), data(4), ckpt_path=ckpt_path)

    def end(self) -> dict[str, Any]:
        """Return what two runs have to have alike."""
        checkpoint = self.trainer.run.checkpoint()
        states = {
            key: {name: value for name, value in state.items() if "path" not in name}
            for key, state in checkpoint["callbacks"].items()
            if not key.startswith("ModelCheckpoint") or "None" not in key
        }
        metrics = self.trainer.callback_metrics
        return {
            "weights": checkpoint["state_dict"],
            "optimizers": checkpoint["optimizer_states"],
            "schedulers": checkpoint["lr_schedulers"],
            "progress": checkpoint["progress"],
            "values": {name: float(value) for name, value in metrics.items()},
            "logged": {n: float(v) for n, v in self.trainer.logged_metrics.items()},
            "callbacks": {k: s for k, s in states.items() if k.startswith("EarlyStopping")},
        }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def saved_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "best").glob("*.ckpt")}


def check_every_resume(
    tmp_path: Path,
    make: Callable[[], Net],
    callbacks: Callable[[Path], list[Callback]] = lambda folder: [],
    **options: Any,
) -> None:
    """Compare runs that resume from every step with the one that was not interrupted."""
    whole = Run(tmp_path / "whole", make, callbacks, **options)
    expected = whole.end()
    steps = whole.trainer.global_step
    assert steps > 8
    for step in range(1, steps + 1):
        folder = tmp_path / f"from{step}"
        path = tmp_path / "whole" / "all" / f"step={step}.ckpt"
        rest = Run(folder, make, callbacks, path, **options)
        for name, value in rest.end().items():
            assert same(value, expected[name]), f"{name}, resumed from step {step}"
        epochs = [one for one in whole.net.epochs if one[0] >= step]
        assert rest.net.epochs == epochs, f"resumed from step {step}"
        ended = [row for row in rest.rows.rows if "mean" in row[1] or "val" in row[1]]
        rows = [row for row in whole.rows.rows if "mean" in row[1] or "val" in row[1]]
        assert ended == rows[len(rows) - len(ended) :], f"resumed from step {step}"
        late = {file for file in saved_files(tmp_path / "whole") if _step(file) > step}
        assert late == {f for f in saved_files(folder) if _step(f) > step}, f"from step {step}"


def _step(name: str) -> int:
    return int(name.partition("step=")[2].partition(".")[0])


def best(monitor: str, **options: Any) -> Callable[[Path], list[Callback]]:
    def callbacks(folder: Path) -> list[Callback]:
        return [
            EarlyStopping(monitor, patience=20),
            ModelCheckpoint(folder, monitor=monitor, save_top_k=-1, filename="{step}", **options),
        ]

    return callbacks


@pytest.mark.parametrize("monitor", ["mean", "loss_epoch", "median", "first", "val"])
def test_values_of_an_epoch_decide_the_same_after_a_resume(monitor: str, tmp_path: Path) -> None:
    check_every_resume(tmp_path, lambda: Net(plateau(monitor)), best(monitor))


def test_values_of_the_last_validation_are_there_after_a_resume(tmp_path: Path) -> None:
    check_every_resume(
        tmp_path, lambda: Net(plateau("val", "step")), best("val", every_n_train_steps=2)
    )
