"""RunHints: each hint comes for its mistake, and does not come for the nearest right setting."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.utils.data import DataLoader, Dataset, RandomSampler, SubsetRandomSampler

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint, RunHints
from stratagem.launch import process
from stratagem_extras.callbacks import data_wait, run_hints
from stratagem_extras.callbacks.data_wait import DataWait
from stratagem_extras.callbacks.run_hints import better_mode

Hints = Callable[..., list[str]]


class Net(Module):
    """Two layers; options choose the mistakes."""

    def __init__(
        self,
        *,
        metrics: tuple[str, ...] = (),
        unused: bool = False,
        held: str = "",
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 1), nn.Linear(4, 1)
        self.metrics, self.unused, self.held = metrics, unused, held
        self.schedule, self.interval = schedule, interval

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        other = 0.0 if self.unused else self.head(batch)
        return (self.layer(batch) + other).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name in self.metrics:
            self.log(name, 0.1 * (1 + self.trainer.current_epoch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        module = getattr(self, self.held) if self.held else self
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        config = {"scheduler": scheduler, "interval": self.interval, "monitor": "val_accuracy"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def loader(samples: int = 32, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, 4), batch_size, **options)  # type: ignore[arg-type]


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"max_epochs": 3, "enable_checkpointing": saves, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


@pytest.fixture
def hints(capsys: pytest.CaptureFixture[str]) -> Iterator[Hints]:
    """A function that fits, or calls another function, and returns the lines of hints."""
    process.print_hint_once.cache_clear()

    def hints_of(
        module: Module, *callbacks: Callback, train: Any = None, val: Any = None, **options: Any
    ) -> list[str]:
        trainer(*callbacks, **options).fit(module, train or loader(), val or loader())
        return capsys.readouterr().err.splitlines()

    yield hints_of
    process.print_hint_once.cache_clear()


# -- the direction of a monitored value


@pytest.mark.parametrize("mode", ["min", "max"])
def test_wrong_monitor_mode_is_hinted_once(hints: Hints, tmp_path: Path, mode: str) -> None:
    wrong = {"val_accuracy": "min", "val_loss": "max"}
    callbacks = [
        ModelCheckpoint(tmp_path, monitor="val_accuracy", mode=mode),  # type: ignore[arg-type]
        EarlyStopping("val_loss", mode=mode, patience=9),  # type: ignore[arg-type]
    ]
    net = Net(
        metrics=tuple(wrong),
        schedule=lambda optimizer, _: ReduceLROnPlateau(optimizer, mode=mode),  # type: ignore[arg-type]
    )
    name, better, word = ("val_accuracy", "max", "larger")
    kept, passed = 0.1, 0.2
    if mode == "max":
        name, better, word, kept, passed = "val_loss", "min", "smaller", 0.2, 0.1
    owners = [
        o
        for o, m in (("ModelCheckpoint", 0), ("EarlyStopping", 1), ("ReduceLROnPlateau", 0))
        if list(wrong)[m] == name
    ]
    assert hints(net, *callbacks) == [
        f"stratagem: {owner}(monitor='{name}', mode='{mode}') takes {kept:g} as better than "
        f"{passed:g}, and by its name '{name}' is better if it is {word}: pass mode='{better}'"
        for owner in owners
    ]


def test_no_mode_is_wrong_for_equal_values_or_an_unknown_name(hints: Hints, tmp_path: Path) -> None:
    assert hints(Net(metrics=("score",)), ModelCheckpoint(tmp_path, monitor="score")) == []
    once = ModelCheckpoint(tmp_path, monitor="val_accuracy")
    assert hints(Net(metrics=("val_accuracy",)), once, max_epochs=1) == []


def test_the_name_of_a_metric_says_which_values_are_better() -> None:
    larger = ["val_acc", "valAccuracy", "val/f1", "test.AUROC", "acc5", "map50", "r2", "top1_acc"]
    smaller = ["val_loss", "loss/dataloader_idx_0", "error", "RMSE", "trainLoss", "wer"]
    unknown = ["score", "accumulated", "heatmap", "acc_loss", "recall_error", "lossless", "f"]
    assert {better_mode(name) for name in larger} == {"max"}
    assert {better_mode(name) for name in smaller} == {"min"}
    assert {better_mode(name) for name in unknown} == {None}


def test_monitored_value_never_logged_is_hinted(hints: Hints) -> None:
    stopping = EarlyStopping("val_los", strict=False)
    unchecked = {"max_epochs": 1, "num_sanity_val_steps": 0}
    assert hints(Net(metrics=("val_loss",)), stopping, **unchecked) == [
        "stratagem: EarlyStopping(monitor='val_los') had no effect, because no value of that name "
        "was logged; there is val_loss: log it with self.log('val_los', ...), or monitor another "
        "value"
    ]
    assert hints(Net(metrics=("val_loss",)), EarlyStopping("val_loss"), max_epochs=1) == []
    # The first validation is still to come.
    late = EarlyStopping("val_loss", strict=False)
    assert hints(Net(metrics=("val_loss",)), late, check_val_every_n_epoch=9) == []


# -- the length of a schedule

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "OneCycleLR(total_steps=24)": lambda o, n: OneCycleLR(o, 0.1, total_steps=n),
    "CosineAnnealingLR(T_max=24)": CosineAnnealingLR,
    "LambdaLR(num_training_steps=24)": lambda o, n: LambdaLR(o, Warmup(num_training_steps=n)),
}


class Warmup:
    """Has `keywords`, as the partial function that transformers' schedules pass."""

    def __init__(self, **keywords: int) -> None:
        self.keywords = keywords

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_scheduler_with_epoch_interval_is_hinted(hints: Hints, name: str) -> None:
    argument = name.partition("(")[2].partition("=")[0]
    assert hints(Net(schedule=SCHEDULES[name])) == [
        f"stratagem: {name} is stepped once an epoch, so that this fit takes 3 of its 24 steps: "
        "return {'scheduler': ..., 'interval': 'step'} from configure_optimizers, or pass "
        f"{argument}=3"
    ]
    assert hints(Net(schedule=SCHEDULES[name], interval="step")) == []


def test_a_schedule_of_epochs_has_no_hint(hints: Hints) -> None:
    assert hints(Net(schedule=lambda o, _: CosineAnnealingLR(o, 3))) == []
    assert hints(Net(schedule=lambda o, _: CosineAnnealingLR(o, 100))) == []
    # One step is one epoch.
    assert hints(Net(schedule=CosineAnnealingLR), train=loader(4)) == []


@pytest.mark.parametrize("monitor", ["val_los", "vq_loss", "val_loss"])
def test_misspelled_monitor_is_hinted_after_the_sanity_check(hints: Hints, monitor: str) -> None:
    class Both(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if monitor != "val_loss":
                self.log(monitor, 1.0)
            return super().training_step(batch, batch_idx)

    said = hints(Both(metrics=("val_loss",)), EarlyStopping(monitor))
    assert said == [
        f"stratagem: EarlyStopping(monitor={monitor!r}): the sanity check logged no value of that "
        f"name, but 'val_loss': pass monitor='val_loss', unless training logs {monitor!r}"
        for _ in range(monitor == "val_los")
    ]


def test_more_processes_than_cores_are_hinted(
    hints: Hints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ranks that share a core, as a run of 5 processes would have; here the plan alone has them.
    monkeypatch.setattr(run_hints, "available_cores", lambda: 2)
    found = trainer()
    found.runtime.plan = replace(found.plan, devices=(0, 1, 2, 3, 4))
    hint = RunHints(print)
    hint._check_cores(found)
    assert capsys.readouterr().out == (
        "devices=5 starts that many processes on 2 CPU cores, which slow each other down: pass "
        "devices=2 or fewer\n"
    )
    found.runtime.plan = replace(found.plan, devices=(0, 1, 2, 3))
    hint._check_cores(found)
    assert capsys.readouterr().out == ""


# -- parameters


def test_parameters_without_an_optimizer_are_named(hints: Hints) -> None:
    assert hints(Net(held="layer")) == [
        "stratagem: no optimizer holds 2 of 4 parameters that get gradients (head.weight, "
        "head.bias), so that they do not train: pass them to the optimizer in "
        "configure_optimizers, or set requires_grad=False"
    ]
    frozen = Net(held="layer")
    frozen.head.requires_grad_(False)
    assert hints(frozen) == []
    # A teacher or an average of the weights gets no gradient.
    assert hints(Net(held="layer", unused=True)) == []


def test_parameters_without_gradients_are_named(hints: Hints) -> None:
    assert hints(Net(unused=True)) == [
        "stratagem: 2 of the 4 parameters of the optimizer had no gradient in the first epoch "
        "(head.weight, head.bias): let the loss depend on them, or set requires_grad=False"
    ]

    class Now(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.unused = batch_idx != 6  # in one of eight steps
            return super().training_step(batch, batch_idx)

    assert hints(Now()) == []
    assert hints(Net(unused=True), fast_dev_run=True) == []
    net = Net()
    trainer(max_epochs=2).fit(net, loader())
    assert not net.trainer.run.require_prepared().optimizers[0]._optimizer_step_post_hooks


@pytest.mark.parametrize("fast", [False, True])
def test_layers_in_a_list_are_hinted_after_the_first_step(hints: Hints, fast: bool) -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 1)]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers[0](batch).square().mean()  # type: ignore[no-any-return]

    assert hints(Listed(), fast_dev_run=fast) == [
        "stratagem: none of the 4 parameters of the optimizer had a gradient in the first step, so "
        "that the model does not train: keep layers of a list or a dict in nn.ModuleList or "
        "nn.ModuleDict, and compute the loss from the model's output without detach()"
    ]


# -- loaders


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_shuffled_evaluation_loader_is_hinted(
    hints: Hints, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    said = []
    whole = loader(shuffle=True)
    subset = loader(sampler=SubsetRandomSampler(range(8)))
    drawn = loader(sampler=RandomSampler(range(32), num_samples=8))
    for data in (loader(), subset, drawn, [loader(), whole]):
        fitted = trainer(max_epochs=1)
        if stage == "fit":
            fitted.fit(Net(), loader(shuffle=True), data)
        else:
            getattr(fitted, stage)(Net(), data)
        said.append(capsys.readouterr().err)
    name = {"fit": "val", "validate": "val"}.get(stage, stage)
    assert said == [
        "",
        "",
        "",
        f"stratagem: {name}_dataloaders: a loader has shuffle=True, so that samples come in "
        "another order each time, and a limit of batches leaves out others: pass shuffle=False\n",
    ]


class Slow(Dataset[Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


def test_slow_dataloader_is_hinted_once(hints: Hints) -> None:
    slow: DataLoader[Any] = DataLoader(Slow(0.01), 4)
    said = hints(Net(), train=slow, max_epochs=2)
    assert len(said) == 1
    assert re.fullmatch(
        r"stratagem: epoch 0 waited \d\.\d of \d\.\d seconds for training batches: DataLoader\("
        r"num_workers=\d, persistent_workers=True\) reads them meanwhile",
        said[0],
    )


@pytest.mark.parametrize(
    ("read", "step", "batches", "is_most"),
    [
        (0.1, 0.05, 16, True),
        (0.1, 0.2, 16, False),  # the steps take longer
        (0.01, 0.001, 16, False),  # a short epoch
        (9.0, 0.1, 7, False),  # few batches
    ],
)
def test_an_epoch_is_judged_by_the_time_after_its_first_batch(
    monkeypatch: pytest.MonkeyPatch, read: float, step: float, batches: int, is_most: bool
) -> None:
    clock = 0.0

    def reads() -> Iterator[int]:
        nonlocal clock
        for batch in range(batches):
            clock += read if batch else 100.0  # the first one starts workers
            yield batch

    monkeypatch.setattr(data_wait, "perf_counter", lambda: clock)
    wait = DataWait(torch.device("cpu"))
    for _ in wait.reads(reads()):
        clock += step
    assert wait.waited == pytest.approx(read * (batches - 1))
    assert wait.whole == pytest.approx((read + step) * (batches - 1))
    assert wait.is_most is is_most


def test_idle_time_of_a_device_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Two events: 80 ms of each read of 100 ms are idle."""

        def __init__(self, *_: object, **__: object) -> None:
            self.recorded = 0

        def record(self) -> None:
            self.recorded += 1

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return 80.0

    def reads() -> Iterator[int]:
        for batch in range(5):
            time.sleep(0.1 if batch else 0.2)
            yield batch

    monkeypatch.setattr(torch, "Event", Event)
    wait = DataWait(torch.device("cuda"))
    assert list(wait.reads(reads())) == [0, 1, 2, 3, 4]
    assert wait.batches == 5
    # Of four reads after the first, the last one's idle time is not looked at.
    assert wait.waited == pytest.approx(0.08 * 3)
    monkeypatch.undo()
    without = DataWait(torch.device("meta"))
    assert list(without.reads(iter([1]))) == [1]
    assert without.waited == 0.0


# -- resuming


def test_resume_with_another_effective_batch_size_is_hinted(
    hints: Hints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(tmp_path)
    assert hints(Net(), saver, max_epochs=1, accumulate_grad_batches=2) == []

    def resume(batch_size: int, accumulate: int) -> str:
        resumed = trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        resumed.fit(Net(), loader(32, batch_size), ckpt_path=saver.best_model_path)
        return capsys.readouterr().err

    assert resume(4, 2) == resume(2, 4) == resume(8, 1) == ""
    assert resume(4, 1) == (
        "stratagem: a step of this run takes about 4 samples (batch_size=4, "
        "accumulate_grad_batches=1, data-parallel ranks: 1), and a step of the run that it resumes "
        "took about 8: choose these arguments so that the numbers are equal, or adapt the learning "
        "rate\n"
    )


# -- all


def test_one_variable_switches_all_hints_off(
    hints: Hints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val_accuracy")

    def net() -> Net:
        return Net(metrics=("val_accuracy",), unused=True, schedule=CosineAnnealingLR)

    monkeypatch.setenv("STRATAGEM_HINTS", "0")
    assert hints(net(), saver, val=loader(shuffle=True)) == []
    process.print_hint("said elsewhere")
    assert hints(net(), max_epochs=1) == []
    monkeypatch.setenv("STRATAGEM_HINTS", "1")
    assert len(hints(net(), saver, val=loader(shuffle=True))) == 4


def test_run_hints_are_unlisted_and_absent_in_trials(capsys: Any) -> None:
    fitted = trainer(max_epochs=1)
    trial = fitted.with_options(fitted.options)
    trial.fit(Net(unused=True), loader())
    assert capsys.readouterr().err == ""
    fitted.fit(Net(), loader())
    assert not any(isinstance(callback, RunHints) for callback in fitted.callbacks)


RANKS = """
import torch
from torch.utils.data import DataLoader
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch) + self.head(batch)).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="STRATEGY", max_epochs=3, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )
    data = torch.ones(32, 4)
    trainer.fit(Net(), DataLoader(data, 4), DataLoader(data, 4, shuffle=True))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_0_alone_prints_hints(
    run_script: Callable[..., subprocess.CompletedProcess[str]], strategy: str
) -> None:
    done = run_script(RANKS.replace("STRATEGY", strategy))
    said = [line for line in done.stderr.splitlines() if line.startswith("stratagem: ")]
    assert len(said) == 3, done.stderr
    assert said[0].startswith("stratagem: CosineAnnealingLR(T_max=12) is stepped once an epoch")
    assert said[1].startswith("stratagem: val_dataloaders: a loader has shuffle=True")
    assert said[2].startswith("stratagem: no optimizer holds 2 of 4 parameters that get gradients")
