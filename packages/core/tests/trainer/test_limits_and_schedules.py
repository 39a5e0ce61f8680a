"""When validation and schedulers come, what limits a fit, and what users read of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from stratagem import Callback, DataModule, Module, Trainer
from stratagem.callbacks import ModelCheckpoint, batches_to_evaluate
from stratagem.errors import ConfigurationError, UserCodeError

Configure = Callable[[Optimizer], Any]


class Net(Module):
    """Logs `train_value` (1, 2, 0, 1, 2, 0, ...) and `val_value`; notes rates and validations."""

    def __init__(self, configure: Configure | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.configure = configure
        self.rates: list[float] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("train_value", float(len(self.rates) % 3))
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append((self.current_epoch, self.global_step))
        self.log("val_value", float(len(self.validated)))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        return optimizer if self.configure is None else self.configure(optimizer)


def loader(samples: int = 22) -> DataLoader[Tensor]:
    inputs: Any = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(inputs, batch_size=2)


def quiet(**arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    defaults |= {"max_epochs": 2, "num_sanity_val_steps": 0}
    return Trainer(accelerator="cpu", devices=1, **{**defaults, **arguments})


# ---------------------------------------------------------------- schedulers


def plateau(monitor: str, frequency: int = 1, **options: Any) -> Configure:
    def configure(optimizer: Optimizer) -> Any:
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        by_step = {"monitor": monitor, "interval": "step", "frequency": frequency, **options}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **by_step}}

    return configure


def test_a_plateau_by_steps_is_stepped_with_the_value_of_each_step() -> None:
    model = Net(plateau("train_value"))
    quiet(max_epochs=1).fit(model, loader())
    # As with lightning 2.6.6: 1, 2 (worse), 0, 1 (worse), 2 (worse), 0 (no better), ...
    assert model.rates == [1.0, 1.0, *(0.5**n for n in (1, 1, 2, 3, 4, 5, 6, 7, 8))]


@pytest.mark.parametrize(("frequency", "interval"), [(11, 1.0), (4, 4)])
def test_a_plateau_by_steps_reads_the_validation_of_its_step(
    frequency: int, interval: float
) -> None:
    model = Net(plateau("val_value", frequency))
    quiet(max_epochs=3, val_check_interval=interval).fit(model, loader(), loader())
    values: list[float] = []
    expected = [1.0]
    for step in range(1, 33):
        if step % frequency == 0:
            values.append(sum(count <= step for _, count in model.validated))
        expected.append(0.5 ** max(0, len(values) - 1))
    assert model.rates == expected


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"val_check_interval": 4}, [11, 22, 33]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [11, 22, 33]),
        ({"val_check_interval": 15, "check_val_every_n_epoch": None}, [22, 33]),
        ({"val_check_interval": 1.0, "check_val_every_n_epoch": 2}, [22]),
        ({"val_check_interval": 11}, [11, 22, 33]),
    ],
)
def test_a_plateau_by_epochs_steps_once_after_each_epoch_with_a_validation(
    options: dict[str, Any], steps: list[int]
) -> None:
    class Notes(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
            taken.append((model.global_step, float(metrics)))

    taken: list[tuple[int, float]] = []
    model = Net(
        lambda optimizer: {
            "optimizer": optimizer,
            "lr_scheduler": Notes(optimizer),
            "monitor": "val_value",
        }
    )
    quiet(max_epochs=3, **options).fit(model, loader(), loader())
    # `val_value` is the number of validations so far: the latest one counts.
    validations = [sum(at <= step for _, at in model.validated) for step in steps]
    assert taken == list(zip(steps, map(float, validations), strict=True))


def test_missing_plateau_monitor_raises_unless_strict_is_false() -> None:
    with pytest.raises(UserCodeError, match=r"ReduceLROnPlateau.monitor='gone'.: no value of that"):
        quiet().fit(Net(plateau("gone")), loader())
    model = Net(plateau("gone", 22, strict=False, name="rate"))
    with pytest.warns(UserWarning, match="'gone'.: no value .* left as it is, with strict=False"):
        quiet().fit(model, loader())
    assert set(model.rates) == {1.0}


def test_code_that_steps_itself_may_have_a_scheduler_of_any_kind() -> None:
    class Warms:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def warm(self) -> None:
            self.optimizer.param_groups[0]["lr"] /= 2

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.optimizers().step()
            self.lr_schedulers().warm()
            return torch.zeros(())

    model = Manual(lambda o: ([o], [Warms(o)]))
    trainer = quiet(max_epochs=1, limit_train_batches=2)
    trainer.fit(model, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_needs_optimizer_false_allows_no_optimizer() -> None:
    class Statistics(Net):
        needs_optimizer = False
        total = 0.0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.total += float(batch.sum())
            loss: Tensor = self.layer(batch).sum()
            return loss

        def configure_optimizers(self) -> Any:
            return None

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    model, trainer = Statistics(), quiet(max_epochs=2)
    before = model.layer.weight.clone()
    with pytest.warns(UserWarning, match=r"will run with no optimizer.*Return an optimizer"):
        trainer.fit(model, loader(), loader())
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None
    assert model.total == pytest.approx(2 * sum(float(batch.sum()) for batch in loader()))
    assert (trainer.global_step, trainer.current_epoch, len(model.validated)) == (0, 2, 2)
    endless = "Statistics.configure_optimizers.. returned None, and only max_steps=3, which counts"
    with (
        pytest.warns(UserWarning, match="will run with no optimizer"),
        pytest.raises(UserCodeError, match=endless),
    ):
        quiet(max_epochs=-1, max_steps=3).fit(Statistics(), loader())
    Statistics.needs_optimizer = True
    with pytest.raises(UserCodeError, match="returned None; expected an optimizer, a list"):
        quiet().fit(Statistics(), loader())


def test_dataloader_hooks_are_called_in_order_of_first_use() -> None:
    asked: list[tuple[str, float]] = []

    class Asked(Net):
        def train_dataloader(self) -> Any:
            asked.append(("train", float(torch.rand(()))))
            return loader()

        def val_dataloader(self) -> Any:
            asked.append(("val", float(torch.rand(()))))
            return loader()

    for checked in (0, 1):
        torch.manual_seed(1)
        quiet(max_epochs=1, limit_train_batches=1, num_sanity_val_steps=checked).fit(Asked())
    assert [name for name, _ in asked] == ["train", "val", "val", "train"]
    # Training draws the same, with a sanity check and without it.
    assert asked[0][1] == asked[2][1] == asked[3][1] != asked[1][1]


def sequential(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [ConstantLR(optimizer, 0.1, 2), ExponentialLR(optimizer, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize(
    ("make", "interval"),
    [(sequential, "epoch"), (lambda o: OneCycleLR(o, 1.0, total_steps=9), "step")],
)
def test_schedulers_of_other_kinds_step_as_in_a_loop(make: Any, interval: str) -> None:
    model = Net(lambda o: ([o], [{"scheduler": make(o), "interval": interval}]))
    quiet(max_epochs=8, limit_train_batches=1).fit(model, loader())
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert model.rates == rates


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (7, [(0, 7), (1, 14), (1, 21), (2, 28)]),
        (15, [(1, 15), (2, 30)]),
        (11, [(0, 11), (1, 22), (2, 33)]),
    ],
)
def test_validation_counts_batches_over_epochs(
    interval: int, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    model = Net()
    options: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": interval}
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=13, save_top_k=-1)
    trainer = quiet(max_epochs=3, callbacks=saver, enable_checkpointing=True, **options)
    trainer.fit(model, loader(), loader())
    # As with lightning 2.6.6.
    assert model.validated == expected
    resumed = Net()
    saved = next(tmp_path.glob("*step=13*"))
    quiet(max_epochs=3, **options).fit(resumed, loader(), loader(), ckpt_path=saved)
    assert resumed.validated == [(epoch, step) for epoch, step in expected if step > 13]


class Promised(IterableDataset[Tensor]):
    """Yields 7 samples, and promises 10."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(7, 3))


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        ({}, [7, 14]),
        ({"accumulate_grad_batches": 2}, [4, 8]),
        ({"val_check_interval": 0.5}, [5, 7, 12, 14]),
        # Every third batch of an epoch; the tenth of ten would have no validation.
        ({"val_check_interval": 3}, [3, 6, 10, 13]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10]),
        ({"limit_train_batches": 4}, [4, 8]),
    ],
)
def test_an_epoch_with_fewer_batches_than_its_length_ends_with_its_validation(
    options: dict[str, Any], validated: list[int]
) -> None:
    model = Net()
    data = DataLoader(Promised(), batch_size=1)
    trainer = quiet(**options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(model, data, loader())
    assert [step for _, step in model.validated] == validated
    short = (
        "the training data loader yielded 7 batches, but its length promised 10: the epoch ends "
        "after those. Let __len__ return the number that __iter__ yields, or leave __len__ out"
    )
    count = 0 if "limit_train_batches" in options else 2
    assert [str(one.message) for one in told] == [short] * count


@pytest.mark.filterwarnings("ignore:.*but its length promised 10")
def test_an_epoch_with_fewer_batches_than_its_length_resumes_exactly(tmp_path: Path) -> None:
    class Promises(SequentialSampler):
        def __len__(self) -> int:
            return 10

    def data() -> DataLoader[Tensor]:
        samples: Any = torch.arange(21.0).reshape(7, 3) / 21
        return DataLoader(samples, sampler=Promises(samples))

    def plateau_of_values(optimizer: Optimizer) -> Any:
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "of_weights"}

    class Whole(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("of_weights", self.layer(batch).mean())

    def fit(model: Net, **arguments: Any) -> Net:
        savers = [
            ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(
                tmp_path / "ends", "{step}", save_on_train_epoch_end=False, save_top_k=-1
            ),
        ]
        saves: dict[str, Any] = {} if arguments else {"callbacks": savers}
        quiet(enable_checkpointing=not arguments, **saves).fit(model, data(), data(), **arguments)
        return model

    torch.manual_seed(0)
    whole = fit(Whole(plateau_of_values))
    assert [step for _, step in whole.validated] == [7, 14]
    saved = [
        (folder, path) for folder in ("steps", "ends") for path in (tmp_path / folder).iterdir()
    ]
    assert len(saved) == 16
    for folder, path in saved:
        step = int(path.stem.removeprefix("step="))
        resumed = fit(Whole(plateau_of_values), ckpt_path=path)
        is_left = [at for at in (7, 14) if at > step or (at == step and folder == "steps")]
        assert [at for _, at in resumed.validated] == is_left, path
        assert resumed.rates == whole.rates[step:], path
        assert torch.equal(resumed.layer.weight, whole.layer.weight), path


@pytest.mark.parametrize("time", [timedelta(seconds=30), "00:00:00:30", {"seconds": 30}])
def test_validation_comes_after_a_time(time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Takes(Net):
        """Each batch takes 10 seconds, and each validation 25."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            clock[0] += 10
            return super().training_step(batch, batch_idx)

        def on_validation_end(self) -> None:
            clock[0] += 25

    clock_of_runs = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("stratagem.trainer.loops.interruption.time", clock_of_runs)
    model, trainer = Takes(), quiet(val_check_interval=time)
    assert trainer.options.val_check_interval == timedelta(seconds=30)
    trainer.fit(model, loader(), loader())
    # Counted from the start of training, and then from the end of each validation.
    assert [step for _, step in model.validated] == [3, 6, 9, 12, 15, 18, 21]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"check_val_every_n_epoch": None},
            "check_val_every_n_epoch=None counts batches over epochs, and val_check_interval=1.0 "
            "is a fraction of an epoch: pass a number of batches (int) or a time",
        ),
        (
            {"val_check_interval": "soon"},
            "val_check_interval='soon': expected a timedelta, text of the format DD:HH:MM:SS, a "
            "dict of its arguments, or seconds",
        ),
        (
            {"val_check_interval": timedelta(0)},
            "val_check_interval=datetime.timedelta(0): expected a time above 0",
        ),
        (
            {"check_val_every_n_epoch": 0},
            "check_val_every_n_epoch=0: expected a whole number of at least 1",
        ),
    ],
)
def test_bad_validation_intervals_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        quiet(**arguments)
    assert str(raised.value) == text


# ---------------------------------------------------------------- limits


def test_the_limits_of_a_fit_may_be_set_between_fits_and_within() -> None:
    class Stops(Net):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                self.trainer.options = replace(self.trainer.options, max_epochs=2)

    trainer = quiet(max_epochs=1)
    trainer.options = replace(trainer.options, max_epochs=5)
    trainer.fit(Stops(), loader())
    assert trainer.current_epoch == 2
    trainer.options = replace(trainer.options, max_steps=3)
    trainer.fit(Net(), loader())
    assert trainer.global_step == 3
    with pytest.raises(AttributeError, match=r"replace\(trainer.options, max_epochs=...\)"):
        trainer.max_epochs = 5
    with pytest.raises(ConfigurationError, match="max_epochs=-2: expected a whole number"):
        replace(trainer.options, max_epochs=-2)


def test_numbers_of_batches_may_be_whole_floats_and_set_between_runs() -> None:
    trainer = quiet(max_epochs=1, limit_train_batches=3.0, limit_val_batches=0.5)
    assert (trainer.options.limit_train_batches, trainer.options.limit_val_batches) == (3, 0.5)
    trainer.fit(Net(), loader(), loader())
    assert (trainer.global_step, trainer.run.validation.loaders[0].batches) == (3, 5)
    trainer.options = replace(trainer.options, limit_train_batches=2, limit_val_batches=1.0)
    trainer.fit(Net(), loader(), loader())
    assert (trainer.global_step, trainer.run.validation.loaders[0].batches) == (2, 11)
    with pytest.raises(ConfigurationError, match=r"limit_test_batches=1.5: expected a number of"):
        replace(trainer.options, limit_test_batches=1.5)


def test_max_steps_ends_a_fit_that_takes_several_steps_of_a_batch() -> None:
    class Twice(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for _ in range(2):
                self.manual_backward(self.layer(batch).mean())
                self.optimizers().step()

    trainer = quiet(max_steps=5)
    trainer.fit(Twice(), loader())
    assert trainer.global_step == 6


def test_a_sanity_check_of_all_batches() -> None:
    counts = []

    class Counts(Callback):
        def on_sanity_check_end(self, trainer: Trainer, module: Any) -> None:
            counts.append(len(module.validated))
            assert batches_to_evaluate(trainer, "validation") == [11]

        def on_validation_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            counts.append(0)

    trainer = quiet(num_sanity_val_steps=-1, max_epochs=1, limit_train_batches=0)
    trainer.callbacks.append(Counts())
    trainer.fit(Net(), loader(), loader())
    assert counts == [0] * 11 + [1]


def test_trainer_state_before_and_after_runs() -> None:
    trainer = quiet(max_epochs=1)
    assert (trainer.optimizers, trainer.lr_scheduler_configs) == ([], [])
    assert trainer.num_training_batches == float("inf")
    assert (trainer.state.fn, trainer.state.status) == (None, "finished")
    trainer.fit(Net(plateau("train_value", strict=False)), loader())
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == ("fit", "", True)
    config = trainer.lr_scheduler_configs[0]
    assert (config.reduce_on_plateau, config.strict) == (True, False)
    trainer.validate(dataloaders=loader(), verbose=False)
    assert trainer.state.fn == "validate"


def test_data_may_be_prepared_on_the_first_rank_of_all() -> None:
    class Prepares(DataModule):
        prepare_data_per_node = False
        prepared = 0

        def prepare_data(self) -> None:
            self.prepared += 1

        def train_dataloader(self) -> Any:
            return loader()

    datamodule = Prepares()
    quiet().fit(Net(), datamodule=datamodule)
    assert datamodule.prepared == 1


# ---------------------------------------------------------------- what is said


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(8, 3)


def test_a_checkpoint_of_an_epochs_end_goes_on_exactly_and_warns_of_nothing(
    tmp_path: Path,
) -> None:
    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    trainer = quiet(callbacks=saver, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(Net(), DataLoader(Endless(), 2))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer = quiet(callbacks=saver, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="in the middle of an epoch may differ"):
        trainer.fit(Net(), DataLoader(Endless(), 2))


def test_one_epoch_is_no_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=1, limit_train_batches=1, enable_progress_bar=True).fit(Net(), loader())
    said = capsys.readouterr().err
    assert "training ended after 1 epoch, 1 step: max_epochs=1" in said


CTRL_C = """
import signal, torch
from stratagem import Module, Trainer
from stratagem.callbacks import ModelCheckpoint, batches_to_evaluate

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            signal.raise_signal(signal.SIGINT)
        self.log("loss", float(batch_idx), on_step=True)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

best = ModelCheckpoint("c", filename="best-{step}", monitor="loss", every_n_train_steps=1)
newest = ModelCheckpoint("c", filename="newest-{step}", every_n_train_steps=1)
Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        callbacks=[best, newest]).fit(Net(), torch.ones(8, 4, 1))
"""


def test_ctrl_c_names_the_newest_checkpoint(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CTRL_C],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == -signal.SIGINT
    assert "newest-step=3.ckpt') resumes the run" in ended.stderr
