"""A resumed run has the values, schedulers and callbacks of the run that was never interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.loggers import Logger

SCRIPTS = Path(__file__).parents[1] / "scripts"


pytestmark = pytest.mark.usefixtures("one_thread")


class Rows(Logger):
    """Keeps rows of epochs; those of single steps are buffered and come as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise AssertionError("a Trainer hands over rows, by log_rows")

    def log_rows(self, rows: Any) -> None:
        self.rows += [(step, {k: float(v) for k, v in values.items()}) for step, values in rows]


class Net(Module):
    """Logs in each way that there is, and draws random numbers in training and validation.

    Args:
        schedulers: makes them of the optimizer.
        metric: a metric object of the training.
    """

    def __init__(self, schedulers: Any = None, metric: Any = None) -> None:
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
        self.log("spread", loss, on_epoch=True, on_step=False, reduce_fx=torch.std)
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
    *,
    at_validation: bool = False,
    **options: Any,
) -> None:
    """Compare runs that resume from every step with the one that was not interrupted.

    Args:
        tmp_path: for all of them.
        make: makes the model.
        callbacks: makes them, of a folder.
        at_validation: resume as well from what one of them has saved at the end of validation.
        **options: of `Run`.
    """
    whole = Run(tmp_path / "whole", make, callbacks, **options)
    expected = whole.end()
    steps = whole.trainer.global_step
    assert steps > 8
    saved = [(path, False) for path in (tmp_path / "whole" / "all").glob("*.ckpt")]
    if at_validation:
        saved += [(path, True) for path in (tmp_path / "whole" / "best").glob("*.ckpt")]
    assert len(saved) >= steps
    for path, has_validated in saved:
        folder, step = tmp_path / f"from{path.parent.name}-{path.stem}", _step(path.name)
        why = f"resumed from {path}"
        rest = Run(folder, make, callbacks, path, **options)
        for name, value in rest.end().items():
            assert same(value, expected[name]), f"{name}, {why}"
        assert rest.net.epochs == [one for one in whole.net.epochs if one[0] >= step], why
        rows = [
            (at, row)
            for at, row in whole.rows.rows
            if at >= step or (at == step - 1 and not (has_validated and "val" in row))
        ]
        assert of_epochs(rest.rows.rows) == of_epochs(rows), why
        late = {file for file in saved_files(tmp_path / "whole") if _step(file) > step}
        assert {file for file in saved_files(folder) if _step(file) > step} == late, why


def of_epochs(rows: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    return [(at, row) for at, row in rows if "mean" in row or "val" in row]


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


@pytest.mark.filterwarnings("ignore:.*there is no value yet")
def test_values_of_the_last_validation_are_there_after_a_resume(tmp_path: Path) -> None:
    check_every_resume(
        tmp_path, lambda: Net(plateau("val", "step")), best("val", every_n_train_steps=2)
    )


@pytest.mark.parametrize("monitor", ["mean", "val"])
def test_a_save_at_the_end_of_validation_goes_on_with_the_end_of_the_epoch(
    monitor: str, tmp_path: Path
) -> None:
    check_every_resume(
        tmp_path,
        lambda: Net(plateau(monitor)),
        best("val", save_on_train_epoch_end=False),
        at_validation=True,
        val_check_interval=3,
    )


@pytest.mark.parametrize("monitor", ["loss", "val"])
def test_a_scheduler_that_waits_for_a_value_takes_the_step_of_the_save(
    monitor: str, tmp_path: Path
) -> None:
    check_every_resume(
        tmp_path, lambda: Net(plateau(monitor, "step", frequency=2)), val_check_interval=2
    )


@pytest.mark.parametrize(("batches", "accumulate", "interval"), [(11, 4, 4), (7, 3, 5), (6, 2, 3)])
def test_no_validation_is_added_or_lost_by_a_resume(
    batches: int, accumulate: int, interval: int, tmp_path: Path
) -> None:
    check_every_resume(
        tmp_path,
        Net,
        best("val"),
        batches=batches,
        accumulate_grad_batches=accumulate,
        val_check_interval=interval,
    )


def test_a_stop_by_the_validation_after_the_saved_step_takes_no_further_step(
    tmp_path: Path,
) -> None:
    class Stops(Callback):
        def on_validation_end(self, trainer: Trainer, module: Module) -> None:
            trainer.should_stop = trainer.global_step >= 11

    check_every_resume(tmp_path, Net, lambda folder: [Stops()], val_check_interval=2)


@pytest.mark.parametrize("minimum", [{"min_steps": 9}, {"min_epochs": 2}, {"min_steps": 10}])
def test_a_stop_before_the_minimum_of_training_is_kept(
    minimum: dict[str, Any], tmp_path: Path
) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Module, *args: Any) -> None:
            trainer.should_stop |= trainer.global_step == 3

    check_every_resume(
        tmp_path,
        lambda: Net(plateau("mean")),
        lambda folder: [Stops(), *best("val")(folder)],
        **minimum,
    )


def test_a_stop_by_early_stopping_before_the_minimum_is_kept(tmp_path: Path) -> None:
    def stops(folder: Path) -> list[Callback]:
        return [EarlyStopping("val", patience=1, min_delta=10)]

    check_every_resume(tmp_path, Net, stops, min_epochs=2, max_epochs=5, val_check_interval=2)


@pytest.mark.parametrize("max_steps", [10, 12])
@pytest.mark.parametrize("interval", [2, 5])
def test_a_save_of_the_last_step_goes_on_with_the_end_of_the_epoch(
    max_steps: int, interval: int, tmp_path: Path
) -> None:
    """After an epoch's last batch, and in the middle of an epoch."""
    check_every_resume(
        tmp_path,
        lambda: Net(plateau("mean")),
        best("val"),
        max_steps=max_steps,
        val_check_interval=interval,
    )


@pytest.mark.parametrize(("batches_before", "step"), [(2, 3), (5, 5)])
def test_a_run_that_an_error_ended_in_validation_validates_again(
    batches_before: int, step: int, tmp_path: Path
) -> None:
    """In the middle of the epoch, and after its last batch."""

    class Fails(Net):
        fails = True

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if self.fails and self.global_step == step and batch_idx == 1:
                raise ArithmeticError("it fails here")
            super().validation_step(batch, batch_idx)

    interval: dict[str, Any] = {"val_check_interval": 3} if step == 3 else {}
    saving = ModelCheckpoint(tmp_path / "failed", save_on_exception=True, every_n_epochs=0)
    with pytest.raises(ArithmeticError):
        Run(tmp_path / "first", Fails, lambda _: [saving], **interval)
    path = tmp_path / "failed" / f"exception-step={step}.ckpt"
    Fails.fails = False
    rest = Run(tmp_path, Fails, best("val"), path, **interval)
    assert next(at for at, row in rest.rows.rows if "val" in row) == step - 1
    assert rest.trainer.global_step == 15


@pytest.mark.parametrize("interval", [3, 5])
@pytest.mark.parametrize("hook", ["start", "epoch_start", "batch_end", "epoch_end", "end"])
def test_a_run_that_saved_or_failed_within_a_validation_is_as_one_that_did_not(
    hook: str, interval: int, tmp_path: Path
) -> None:
    """In the middle of an epoch, and after its last batch."""
    torchmetrics = pytest.importorskip("torchmetrics")
    at, path = 5 + interval, tmp_path / "within.ckpt"

    def schedules(optimizer: Any) -> list[Any]:
        return [ExponentialLR(optimizer, 0.9), *plateau("val")(optimizer)]

    class Measured(Net):
        """Its metric is of the validation."""

        def __init__(self) -> None:
            super().__init__(schedules)
            self.seen = torchmetrics.MeanMetric()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.update(batch[0] + torch.rand(()))
            super().validation_step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            self.log("val_seen", self.seen.compute())
            self.seen.reset()

    class Saves(Callback):
        fails = False

    def act(self: Saves, trainer: Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == at and args[2:] in ((), (1, 0)):
            if self.fails:
                raise ArithmeticError("it fails here")
            if not path.exists():
                trainer.save_checkpoint(path)

    setattr(Saves, f"on_validation_{hook}", act)

    def run(name: str, *callbacks: Callback, ckpt_path: Path | None = None) -> Run:
        def made(folder: Path) -> list[Callback]:
            return [*best("val")(folder), *callbacks]

        return Run(tmp_path / name, Measured, made, ckpt_path, val_check_interval=interval)

    whole = run("whole", Saves())
    failing, saver = Saves(), ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=0)
    failing.fails = True
    with pytest.raises(ArithmeticError):
        run("failed", failing, saver)
    for saved in (path, tmp_path / f"exception-step={at}.ckpt"):
        rest = run(f"rest of {saved.stem}", ckpt_path=saved)
        for name, value in rest.end().items():
            assert same(value, whole.end()[name]), (name, saved)
        assert rest.net.epochs == [one for one in whole.net.epochs if one[0] >= at]


@pytest.mark.parametrize("every", [1, 3], ids=["with validation", "without"])
def test_resume_after_an_error_at_epoch_end_repeats_the_epoch_end(
    every: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"check_val_every_n_epoch": every}

    class Fails(Net):
        fails = True

        def on_train_epoch_end(self) -> None:
            if self.fails and self.current_epoch == 1:
                raise ArithmeticError("it fails here")
            super().on_train_epoch_end()

    def made() -> Net:
        return Fails(plateau("mean"))

    Fails.fails = False
    whole = Run(tmp_path / "whole", made, best("mean"), **options)
    Fails.fails = True
    saving = ModelCheckpoint(tmp_path / "failed", save_on_exception=True, every_n_epochs=0)
    with pytest.raises(ArithmeticError):
        Run(tmp_path / "first", made, lambda folder: [*best("mean")(folder), saving], **options)
    Fails.fails = False
    path = tmp_path / "failed" / "exception-step=10.ckpt"
    rest = Run(tmp_path, made, best("mean"), path, **options)
    assert rest.net.epochs == whole.net.epochs[1:]
    assert rest.end()["schedulers"] == whole.end()["schedulers"]
    assert rest.end()["callbacks"] == whole.end()["callbacks"]


def test_generators_of_the_module_go_on(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers, self.choices = torch.Generator().manual_seed(1), random.Random(2)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.numbers) * self.choices.random()

    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(Noise())

    check_every_resume(tmp_path, Noisy)


def test_states_of_metric_objects_go_on(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    check_every_resume(
        tmp_path, lambda: Net(plateau("metric"), torchmetrics.MeanMetric()), best("metric")
    )
    check_every_resume(tmp_path / "all", lambda: Net(metric=torchmetrics.MaxMetric()))


def test_metrics_that_wrap_others_go_on(tmp_path: Path) -> None:
    """Over several epochs, and while the last metric of a tracker has no value."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Wraps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.running = torchmetrics.aggregation.RunningMean(window=3)
            self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
            mean = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])
            self.tracker = torchmetrics.MetricTracker(mean, maximize=False)
            self.tracker.increment()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            for metric in (self.running, self.extremes, self.tracker):
                metric.update(loss.detach())
            self.log("running", self.running.compute())
            self.log_dict({f"{name}_loss": v for name, v in self.extremes.compute().items()})
            return loss

        def on_train_epoch_end(self) -> None:
            best, epoch = self.tracker.best_metric(return_step=True)
            self.log_dict({"best": best["MeanMetric"], "best_epoch": float(epoch["MeanMetric"])})
            self.tracker.increment()
            super().on_train_epoch_end()

    check_every_resume(tmp_path, Wraps)


def test_a_collection_of_metrics_that_share_their_state_goes_on(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Total(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, values: Tensor) -> None:
            self.total = self.total + values.sum()

        def compute(self) -> Any:
            return self.total + 0

    class Twice(Total):
        def compute(self) -> Any:
            return self.total * 2

    class Collects(Net):
        def __init__(self) -> None:
            super().__init__()
            self.collection = torchmetrics.MetricCollection([Total(), Twice()])

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.collection.update(batch[0])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log_dict(self.collection.compute())
            self.collection.reset()
            super().on_train_epoch_end()

    check_every_resume(tmp_path, Collects)


def keeps(item: Callable[[Tensor], Any]) -> Callable[[], Net]:
    """Return a Module whose torchmetrics object keeps one item of each batch in a list."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Kept(torchmetrics.Metric):  # type: ignore[misc,name-defined]
        full_state_update = False
        items: list[Any]

        def __init__(self) -> None:
            super().__init__()
            self.add_state("items", [], dist_reduce_fx=None)

        def update(self, batch: Tensor) -> None:
            self.items.append(item(batch))

        def compute(self) -> Tensor:
            return torch.tensor(float(hash(str(self.items)) % 2**20))

    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.kept = Kept()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.kept.update(batch[0])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("kept", self.kept.compute())
            self.kept.reset()
            super().on_train_epoch_end()

    return Keeps


@pytest.mark.parametrize(
    "item",
    [
        lambda batch: str(batch.sum().item()),
        lambda batch: (batch.shape, batch.sum(), (batch.mean().item(), "of a batch")),
    ],
)
def test_a_metric_object_that_keeps_lists_of_plain_data_goes_on(
    item: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    check_every_resume(tmp_path, keeps(item))


def test_metric_with_unsavable_state_is_named_at_the_save(tmp_path: Path) -> None:
    make = keeps(lambda batch: range(3))
    expected = r"Kept kept\['items'\]\[0\] is of type builtins.range, so its state is not in"
    with pytest.warns(UserWarning, match=expected) as caught:
        Run(tmp_path / "whole", make, lambda _: [], max_steps=3)
    assert sum("Kept kept" in str(warning.message) for warning in caught) == 1
    path = tmp_path / "whole" / "all" / "step=3.ckpt"
    with pytest.warns(UserWarning, match=expected):
        assert Run(tmp_path, make, lambda _: [], path).net.epochs


def test_metric_outside_of_module_attributes_warns_at_the_save(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Hides(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torchmetrics.MeanMetric()]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.hidden[0].update(loss.detach())
            self.log("hidden", self.hidden[0], on_epoch=True, on_step=False)
            return loss

    with pytest.warns(UserWarning, match="'hidden'.* with a MeanMetric that is not an attribute"):
        Run(tmp_path, Hides, lambda _: [], max_steps=2)


def test_a_value_that_is_logged_with_other_options_after_a_resume_begins_anew(
    tmp_path: Path,
) -> None:
    class Reduces(Net):
        def __init__(self, reduce_fx: str) -> None:
            super().__init__()
            self.fx = [reduce_fx]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("new", loss, on_epoch=True, on_step=False, reduce_fx=self.fx[0])
            return loss

    Run(tmp_path / "whole", lambda: Reduces("mean"), lambda _: [], max_steps=3)
    path = tmp_path / "whole" / "all" / "step=3.ckpt"
    with pytest.warns(UserWarning, match="'new'.* with other options than in the run that saved"):
        rest = Run(tmp_path, lambda: Reduces("sum"), lambda _: [], path, max_epochs=1)
    assert rest.net.epochs[0][1]["new"] > 0


def test_a_run_that_max_steps_ended_within_an_epoch_goes_on_with_its_values(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", lambda: Net(plateau("mean")), best("mean"))
    first = Run(tmp_path / "first", lambda: Net(plateau("mean")), lambda _: [], max_steps=7)
    first.trainer.save_checkpoint(tmp_path / "ended.ckpt")
    rest = Run(tmp_path, lambda: Net(plateau("mean")), best("mean"), tmp_path / "ended.ckpt")
    for name in ("weights", "optimizers", "schedulers", "values"):
        assert same(rest.end()[name], whole.end()[name]), name
    assert rest.net.epochs == whole.net.epochs[1:]


@pytest.mark.slow
def test_two_ranks_and_one_that_goes_on_for_them_have_the_values_of_the_whole_epoch(
    tmp_path: Path,
) -> None:
    def values(devices: int, name: str, ckpt_path: str) -> Any:
        arguments = (str(devices), name, ckpt_path)
        run_file(SCRIPTS / "resumed_values.py", *arguments, folder=tmp_path)
        return [
            json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(devices)
        ]

    whole = values(2, "whole", "")
    for step in (2, 5):
        path = str(tmp_path / "whole" / f"step={step}.ckpt")
        assert values(2, f"two from {step}", path) == whole
        (alone,) = values(1, f"one from {step}", path)
        # What is left of the first epoch is read by one rank, in steps of half the samples.
        for name in ("sum", "max", "mean", "metric"):
            expected = pytest.approx(whole[0]["epochs"][0][name])
            assert alone["epochs"][0][name] == expected, f"{name}, resumed from step {step}"
    # Two ranks go on for one, in the epoch and at its end, where one of them has logged nothing.
    (whole_alone,) = values(1, "alone", "")
    for step in (8, 10):
        two = values(2, f"two for one from {step}", str(tmp_path / "alone" / f"step={step}.ckpt"))
        for name in ("sum", "max", "mean", "metric"):
            expected = pytest.approx(whole_alone["epochs"][0][name])
            assert two[1]["epochs"][0][name] == expected, f"{name}, resumed from step {step}"
