"""self.log, loggers and the progress bar: what is logged is what is read back."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

from stratagem import Callback, Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.errors import UserCodeError
from stratagem.loggers import CSVLogger, Logger
from stratagem.module.module import LogOptions
from stratagem.trainer.metrics.accumulator import MetricAccumulator


class Memory(Logger):
    """Keeps every row, as it came."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyper_parameters: dict[str, Any] = {}
        self.status = ""

    @property
    def log_dir(self) -> str:
        return "memory"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.hyper_parameters = dict(params)

    def finalize(self, status: str) -> None:
        self.status = status

    def of(self, name: str) -> dict[int | None, float]:
        """Return the values of one name by step."""
        return {step: row[name] for step, row in self.rows if name in row}


class Logs(Module):
    """Calls a function in training_step, and another in validation_step; trains nothing of note."""

    def __init__(
        self,
        train: Callable[[Logs, Any, int], object] = lambda module, batch, index: None,
        validate: Callable[[Logs, Any, int], object] = lambda module, batch, index: None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.train_with, self.validate_with = train, validate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.train_with(self, batch, batch_idx)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validate_with(self, batch, batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class Graphs:
    """A container with the methods of PyTorch Geometric's data."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __copy__(self) -> Graphs:
        return Graphs(self.x)

    def to(self, device: torch.device) -> Graphs:
        return self.apply(lambda tensor: tensor.to(device))

    def apply(self, function: Any) -> Graphs:
        self.x = function(self.x)
        return self


def numbers(count: int = 10, batch_size: int = 4) -> DataLoader[Any]:
    """0.0, 1.0, ... in batches; with the defaults of 4, 4 and 2."""
    return DataLoader(torch.arange(float(count)), batch_size=batch_size)  # type: ignore[arg-type]


def trainer_with(logger: Any = False, **arguments: Any) -> Trainer:
    arguments = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": logger,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        **arguments,
    }
    return Trainer(**arguments)


# ---------------------------------------------------------------- values


def test_step_values_are_logged_unreduced() -> None:
    memory = Memory()
    trainer = trainer_with(memory, max_epochs=2)
    trainer.fit(Logs(lambda m, batch, i: m.log("mean", batch.mean())), numbers())
    assert memory.of("mean") == {0: 1.5, 1: 5.5, 2: 8.5, 3: 1.5, 4: 5.5, 5: 8.5}
    assert trainer.callback_metrics["mean"] == 8.5
    assert memory.status == "success"


def test_logged_metrics_include_step_values() -> None:
    trainer = trainer_with(log_every_n_steps=50)
    trainer.fit(Logs(lambda m, batch, i: m.log("index", i)), numbers())
    assert trainer.logged_metrics == {"index": 2.0}


def test_large_log_every_n_steps_is_hinted_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hint = (
        "stratagem: loggers are given the values of every 17th step (log_every_n_steps), and an "
        "epoch has 3 training batches: pass a smaller number to see more of them\n"
    )
    for logger, every in ((Memory(), 3), (False, 17), (Memory(), 17), (Memory(), 17)):
        trainer_with(logger, log_every_n_steps=every).fit(Logs(), numbers())
    assert capsys.readouterr().err.count(hint) == 1


def test_a_value_that_goes_nowhere_is_refused() -> None:
    nowhere = Logs(lambda m, batch, i: m.log("mean", batch.mean(), on_step=False))
    with pytest.raises(UserCodeError) as raised:
        trainer_with().fit(nowhere, numbers())
    assert str(raised.value) == (
        "self.log('mean', on_step=False, on_epoch=None): the value goes nowhere. In training_step "
        "on_epoch is False unless it is given, elsewhere on_step: pass True for one of them"
    )


def test_the_mean_of_an_epoch_is_weighted_by_batch_size() -> None:
    memory = Memory()

    def log(module: Logs, batch: Tensor, index: int) -> None:
        module.log("both", batch.mean(), on_step=True, on_epoch=True)
        module.log("mean", batch.mean(), on_step=False, on_epoch=True)
        module.log("unweighted", batch.mean(), on_step=False, on_epoch=True, batch_size=1)

    trainer = trainer_with(memory, max_epochs=2)
    trainer.fit(Logs(log), numbers())
    values = trainer.callback_metrics
    assert values["mean"] == pytest.approx(4.5)
    assert values["unweighted"] == pytest.approx((1.5 + 5.5 + 8.5) / 3)
    # Both kinds of one name are told apart; the plain name is the epoch's.
    assert values["both"] == values["both_epoch"] == pytest.approx(4.5)
    assert values["both_step"] == 8.5
    assert memory.of("both_step") == {0: 1.5, 1: 5.5, 2: 8.5, 3: 1.5, 4: 5.5, 5: 8.5}
    assert memory.of("both_epoch") == {2: pytest.approx(4.5), 5: pytest.approx(4.5)}
    assert memory.of("mean") == memory.of("both_epoch")
    assert memory.of("epoch") == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    assert memory.of("both") == {}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 4.5),
        ("sum", 1.5 + 5.5 + 8.5),
        ("max", 8.5),
        ("min", 1.5),
        ("AVG", 4.5),
        (torch.median, 5.5),
        (lambda values: values[0] * 10, 15.0),
    ],
)
def test_an_epochs_values_are_reduced_as_asked(reduce_fx: Any, expected: float) -> None:
    model = Logs(
        lambda m, batch, i: m.log("x", batch.mean(), on_epoch=True, reduce_fx=reduce_fx),
        lambda m, batch, i: m.log("val_x", batch.mean(), reduce_fx=reduce_fx),
    )
    trainer = trainer_with()
    trainer.fit(model, numbers(), numbers())
    values = trainer.callback_metrics
    assert values["x"] == pytest.approx(expected)
    assert values["val_x"] == pytest.approx(expected)


def test_a_function_may_be_written_in_the_call_itself() -> None:
    model = Logs(
        lambda m, batch, i: m.log(
            "x", batch.mean(), on_epoch=True, reduce_fx=lambda values: values.max()
        )
    )
    trainer = trainer_with()
    trainer.fit(model, numbers())
    assert trainer.callback_metrics["x"] == 8.5


def test_many_values_are_reduced_like_few() -> None:
    model = Logs(lambda m, batch, i: m.log("x", batch.mean(), on_epoch=True))
    trainer = trainer_with()
    trainer.fit(model, numbers(301, batch_size=2))
    assert trainer.callback_metrics["x"] == pytest.approx(150.0)


@dataclass
class Sample:
    label: str
    values: Tensor


def weighted(forms: list[Any]) -> float:
    """Return the mean that a validation reports for the values 1 and 5 of these batches."""
    values = {id(batch): value for batch, value in zip(forms, (1.0, 5.0), strict=True)}

    class Reports(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", values[id(batch)])

    result = trainer_with().validate(Reports(lambda *_: None), forms, verbose=False)
    return float(result[0]["x"])


@pytest.mark.parametrize(
    "form",
    [
        lambda n: {"temperature": torch.tensor(0.5), "x": torch.ones(n, 2)},
        lambda n: [{"x": torch.ones(1)} for _ in range(n)],
        lambda n: [{"image": torch.ones(3, 4), "label": 1} for _ in range(n)],
        lambda n: [{"image": torch.ones(3, 4), "boxes": torch.ones(2, 4)} for _ in range(n)],
        lambda n: [(torch.tensor(1.0), torch.ones(5)) for _ in range(n)],
        lambda n: [{"x": torch.ones(n, 2)}, torch.ones(n)],
        lambda n: ("train", [["a"] * 9, torch.ones(n, 7)]),
        lambda n: Graphs(torch.ones(n, 7)),
    ],
)
def test_the_number_of_samples_is_inferred(form: Any) -> None:
    assert weighted([form(3), form(1)]) == pytest.approx((3 * 1.0 + 5.0) / 4)


@pytest.mark.parametrize(
    "form",
    [
        lambda n: (torch.ones(7, n), torch.ones(n)),  # time first
        lambda n: {"offsets": torch.ones(2), "x": torch.ones(n)},
        lambda n: [{"x": torch.ones(7, 2)}] * n,  # samples, or two views of seven
    ],
)
def test_unclear_batch_size_warns_once(form: Any) -> None:
    with pytest.warns(UserWarning, match="the number of samples in a batch is unclear") as said:
        weighted([form(3), form(4)])
    ours = [str(one.message) for one in said if "unclear" in str(one.message)]
    size = 2 if isinstance(form(1), dict) else 7
    assert ours == [
        f"the number of samples in a batch is unclear, and {size} was taken: its tensors have "
        "different first dimensions, or it may be a list of samples. A logged value counts in the "
        "mean of an epoch by that number: pass it, as in self.log(name, value, "
        "batch_size=len(targets))"
    ]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda batch: batch,
        lambda batch: {"names": ["a"] * len(batch), "values": batch},
        lambda batch: ("id", {"deep": [batch]}),
        lambda batch: Sample("label", batch),
    ],
)
def test_log_takes_batch_size_from_the_first_tensor(wrap: Any) -> None:
    def tensor_in(batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return batch["values"]  # type: ignore[no-any-return]
        if isinstance(batch, tuple):
            return batch[1]["deep"][0]  # type: ignore[no-any-return]
        return batch.values if isinstance(batch, Sample) else batch

    model = Logs(lambda m, batch, i: m.log("x", tensor_in(batch).mean(), on_epoch=True))
    trainer = trainer_with()
    trainer.fit(model, [wrap(batch) for batch in numbers()])
    assert trainer.callback_metrics["x"] == pytest.approx(4.5)


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        np.float64(2.0),
        np.float32(2.0),
        np.int64(2),
        np.array([2.0]),
        torch.tensor(2),
        torch.tensor([[2.0]]),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor(2.0, requires_grad=True) * 1,
    ],
)
def test_a_value_may_be_any_kind_of_number(value: Any) -> None:
    memory = Memory()
    model = Logs(lambda m, batch, i: m.log("x", value, on_step=True, on_epoch=True))
    trainer = trainer_with(memory)
    trainer.fit(model, numbers())
    assert memory.of("x_step") == {0: 2.0, 1: 2.0, 2: 2.0}
    assert trainer.callback_metrics["x"] == 2.0
    assert not trainer.callback_metrics["x"].requires_grad
    assert all(type(x) in (int, float) for x in memory.of("x_step").values())


def test_log_copies_tensors_changed_in_place() -> None:
    memory = Memory()
    counter = torch.zeros(())

    def log(module: Logs, batch: Tensor, index: int) -> None:
        counter.add_(1)
        module.log("x", counter, on_step=True, on_epoch=True)
        # The parameter itself, which the optimizer changes.
        module.log("weight", module.weight)

    model = Logs(log)
    trainer_with(memory).fit(model, numbers())
    counter.fill_(100)
    assert memory.of("x_step") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert memory.of("weight") == {
        0: 0.0,
        1: pytest.approx(-0.1),
        2: pytest.approx(-0.2),
    }


def test_log_dict_logs_each_value() -> None:
    memory = Memory()
    model = Logs(lambda m, batch, i: m.log_dict({"a": 1.0, "b": batch.sum()}, on_step=True))
    trainer_with(memory).fit(model, numbers())
    assert memory.rows[0] == (0, {"epoch": 0, "a": 1.0, "b": 6.0})


def test_a_value_is_kept_from_loggers_where_logger_is_false() -> None:
    memory = Memory()
    model = Logs(
        lambda m, batch, i: m.log("train_x", 1.0, logger=False),
        lambda m, batch, i: m.log("val_x", 2.0, logger=False),
    )
    trainer = trainer_with(memory)
    trainer.fit(model, numbers(), numbers())
    assert memory.of("train_x") == {}
    assert memory.of("val_x") == {}
    assert trainer.callback_metrics == {"train_x": 1.0, "val_x": 2.0}
    assert trainer.validate(model, numbers(), verbose=False) == [{"val_x": 2.0}]


def test_outside_of_a_step_the_value_is_the_epochs() -> None:
    memory = Memory()

    class Hooks(Logs):
        def on_train_epoch_start(self) -> None:
            self.log("start", 1.0 + self.current_epoch)

        def on_train_epoch_end(self) -> None:
            self.log("end", 10.0 + self.current_epoch)

        def on_validation_epoch_end(self) -> None:
            self.log("val_end", 20.0 + self.current_epoch)

    trainer_with(memory, max_epochs=2, num_sanity_val_steps=0).fit(Hooks(), numbers(), numbers())
    assert memory.of("start") == {2: 1.0, 5: 2.0}
    assert memory.of("end") == {2: 10.0, 5: 11.0}
    assert memory.of("val_end") == {2: 20.0, 5: 21.0}


def test_values_of_evaluation_steps_are_logged_by_batch() -> None:
    memory = Memory()
    model = Logs(validate=lambda m, batch, i: m.log("x", batch.mean(), on_step=True, on_epoch=True))
    trainer_with(memory).validate(model, numbers(), verbose=False)
    assert memory.of("x_step") == {0: 1.5, 1: 5.5, 2: 8.5}
    assert memory.of("x_epoch") == {0: pytest.approx(4.5)}


def test_of_several_loaders_the_index_ends_the_name_and_steps_are_not_monitored() -> None:
    memory = Memory()
    model = Logs(
        validate=lambda m, batch, i: m.log("x", batch.mean(), on_step=True, on_epoch=True),
    )
    trainer = trainer_with(memory)
    trainer.fit(model, numbers(), [numbers(), numbers()])
    ends = [f"/dataloader_idx_{index}" for index in range(2)]
    assert {f"x_step{end}" for end in ends} <= set(trainer.logged_metrics)
    assert {f"x_epoch{end}" for end in ends} <= set(trainer.logged_metrics)
    assert {f"x{end}" for end in ends} <= set(trainer.callback_metrics)
    assert not any(name.startswith("x_step") for name in trainer.callback_metrics)
    assert memory.of("x_epoch/dataloader_idx_1")


def test_every_nth_step_goes_to_the_loggers() -> None:
    for every, steps in ((1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3]), (0, [])):
        memory = Memory()
        model = Logs(lambda m, batch, i: m.log("x", batch.mean(), on_step=True, on_epoch=True))
        trainer_with(memory, log_every_n_steps=every, max_epochs=2).fit(model, numbers())
        assert list(memory.of("x_step")) == steps
        assert list(memory.of("x_epoch")) == [2, 5]


def test_under_accumulation_a_row_stands_for_an_optimizer_step() -> None:
    memory = Memory()
    model = Logs(lambda m, batch, i: m.log("x", float(i), on_step=True, on_epoch=True))
    trainer = trainer_with(memory, accumulate_grad_batches=2)
    trainer.fit(model, numbers())
    assert memory.of("x_step") == {0: 1.0, 1: 2.0}
    assert trainer.callback_metrics["x"] == pytest.approx((0 * 4 + 1 * 4 + 2 * 2) / 10)


# ---------------------------------------------------------------- torchmetrics


class Classifies(Module):
    """Logs torchmetrics objects, in the ways that their documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.called = BinaryAccuracy()
        self.updated = BinaryAccuracy()
        self.mean = MeanMetric()
        self.val = BinaryAccuracy()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        guesses, truth = batch > 2, torch.ones_like(batch)
        self.called(guesses.float(), truth)
        self.log("called", self.called, on_step=True, on_epoch=True)
        self.updated.update(guesses.float(), truth)
        self.log("updated", self.updated, on_step=True, on_epoch=True)
        self.mean.update(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return self.weight.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val.update((batch > 2).float(), torch.ones_like(batch))
        self.log("val", self.val)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


def test_torchmetrics_objects_are_computed_over_the_epoch_and_reset() -> None:
    memory = Memory()
    model = Classifies()
    trainer = trainer_with(memory, max_epochs=2)
    trainer.fit(model, numbers(), numbers())
    values = trainer.callback_metrics
    for name in ("called", "updated", "val"):
        assert values[name] == pytest.approx(0.7), name
    assert values["mean"] == pytest.approx(4.5)
    assert memory.of("called_step") == {
        0: 0.25,
        1: 1.0,
        2: 1.0,
        3: 0.25,
        4: 1.0,
        5: 1.0,
    }
    # One that is updated, not called, has no value of its own for a step.
    assert memory.of("updated_step") == {}
    assert memory.of("updated_epoch") == {2: pytest.approx(0.7), 5: pytest.approx(0.7)}
    assert memory.of("val") == {2: pytest.approx(0.7), 5: pytest.approx(0.7)}
    assert not torch.as_tensor(model.called.tp).any(), "a metric was not reset"


# ---------------------------------------------------------------- CSV


def read(folder: str | Path) -> list[dict[str, str]]:
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_holds_every_row_and_columns_that_come_up_later(tmp_path: Path) -> None:
    def log(module: Logs, batch: Tensor, index: int) -> None:
        module.log("loss", batch.mean())
        if module.current_epoch == 1 and index == 2:
            module.log("late", 7)

    model = Logs(log, lambda m, batch, i: m.log("val", batch.mean()))
    trainer = trainer_with(None, default_root_dir=tmp_path, max_epochs=2)
    trainer.fit(model, numbers(), numbers())
    assert trainer.log_dir == str(tmp_path / "stratagem_logs" / "version_0")
    rows = read(trainer.log_dir)
    table = [(r["step"], r["loss"], r["epoch"], r["val"], r["late"]) for r in rows]
    assert table == [
        ("0", "1.5", "0", "", ""),
        ("1", "5.5", "0", "", ""),
        ("2", "8.5", "0", "", ""),
        ("2", "", "0", "4.5", ""),
        ("3", "1.5", "1", "", ""),
        ("4", "5.5", "1", "", ""),
        ("5", "8.5", "1", "", "7"),
        ("5", "", "1", "4.5", ""),
    ]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 2**20])
def test_csv_logger_keeps_values_on_a_new_column(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.loggers.csv_logger._PIECE", piece)
    odd: Any = {"a": 'say "so"', "b": "two\r\nlines, one\nmore", "ü,x": '"'}
    logger = CSVLogger(tmp_path)
    logger.log_metrics(odd, 0)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_metrics({"late": 2.0, "later": 3.0}, 2)
    assert read(logger.log_dir) == [
        {"step": "0", **odd, "late": "", "later": ""},
        {"step": "1", "a": "1.0", "b": "", "ü,x": "", "late": "", "later": ""},
        {"step": "2", "a": "", "b": "", "ü,x": "", "late": "2.0", "later": "3.0"},
    ]


def test_a_csv_of_another_tool_is_continued_with_a_late_column(tmp_path: Path) -> None:
    file = tmp_path / "stratagem_logs" / "mine" / "metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("step,loss\n0,0.5\n")  # the ends of its lines are not those of Python's csv
    logger = CSVLogger(tmp_path, version="mine")
    logger.log_metrics({"loss": 0.25}, 1)
    logger.log_metrics({"late": 7.0}, 2)
    table = [(row["step"], row["loss"], row["late"]) for row in read(logger.log_dir)]
    assert table == [("0", "0.5", ""), ("1", "0.25", ""), ("2", "", "7.0")]


def test_a_late_column_costs_a_fraction_of_writing_the_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)

    def seconds(rows: list[tuple[int, dict[str, float]]]) -> float:
        began = process_time()
        logger.log_rows(rows)
        return process_time() - began

    rows = seconds([(step, {"loss": step / 3, "lr": 1e-3, "x": 0.5}) for step in range(100_000)])
    late = min(seconds([(100_000, {f"late{number}": 1.0})]) for number in range(3))
    assert late < rows / 5  # parsing and writing each row anew took half of it


def test_csv_logger_syncs_before_it_replaces_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is dying")

    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="the disk is dying"):
            logger.log_metrics({"late": 1.0}, 1)
        assert read(logger.log_dir) == [{"step": "0", "loss": "0.5"}]
    logger.log_metrics({"late": 1.0}, 1)
    assert read(logger.log_dir)[1] == {"step": "1", "loss": "", "late": "1.0"}


def test_at_the_end_of_a_run_the_disk_has_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_text())

    monkeypatch.setattr(os, "fsync", noting)
    logger = CSVLogger(tmp_path)
    logger.finalize("success")
    assert synced == [], "nothing was logged"
    trainer_with(logger, max_epochs=1).fit(Logs(lambda m, b, i: m.log("loss", 1.0)), numbers())
    assert synced[-1].count("\n") == 4  # a header and three steps


def test_rows_logged_before_an_exception_are_written(tmp_path: Path) -> None:
    def log(module: Logs, batch: Tensor, index: int) -> None:
        module.log("loss", batch.mean())
        if index == 2:
            raise ValueError("in the middle")

    memory = Memory()
    file = CSVLogger(tmp_path)
    with pytest.raises(ValueError, match="in the middle"):
        trainer_with([memory, file]).fit(Logs(log), numbers())
    assert [row["loss"] for row in read(file.log_dir)] == ["1.5", "5.5"]
    assert memory.of("loss") == {0: 1.5, 1: 5.5}
    assert memory.status == "failed"


def test_rows_of_a_validation_that_fails_are_written(tmp_path: Path) -> None:
    def validate(module: Logs, batch: Tensor, index: int) -> None:
        module.log("x", batch.mean(), on_step=True)
        if index == 2:
            raise KeyboardInterrupt

    memory, file = Memory(), CSVLogger(tmp_path)
    trainer = trainer_with([memory, file], num_sanity_val_steps=0)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Logs(lambda m, b, i: m.log("loss", float(i)), validate), numbers(), numbers())
    assert memory.of("loss") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert memory.of("x_step") == {0: 1.5, 1: 5.5}
    assert len(read(file.log_dir)) == 5
    assert memory.status == "failed"


def test_rows_reach_the_loggers_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("stratagem.trainer.metrics.log_buffer.monotonic", lambda: now)
    memory, there = Memory(), []

    def log(module: Logs, batch: Tensor, index: int) -> None:
        nonlocal now
        there.append(len(memory.rows))
        module.log("loss", batch.mean())
        now += 0.9

    trainer_with(memory).fit(Logs(log), numbers(24))
    assert there == [0, 0, 0, 3, 3, 3]


def test_csv_logger_writes_each_row_at_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, 3)
    assert read(logger.log_dir) == [{"step": "3", "loss": "0.5"}]
    logger.log_metrics({"step": 7.0, "loss": 0.25}, 4)
    assert read(logger.log_dir)[1] == {"step": "7.0", "loss": "0.25"}


def test_a_logger_that_takes_one_row_at_a_time_is_saved_after_the_last(tmp_path: Path) -> None:
    class Saved(Memory):
        def save(self) -> None:
            self.rows.append((None, {"saved": 1.0}))

    logger = Saved()
    logger.log_rows([(0, {"a": 1.0}), (1, {"a": 2.0})])
    assert logger.rows == [(0, {"a": 1.0}), (1, {"a": 2.0}), (None, {"saved": 1.0})]


def test_reading_the_latest_values_changes_nothing() -> None:
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            first = trainer.callback_metrics
            first["mine"] = torch.tensor(1.0)
            seen.append((trainer.callback_metrics, trainer.callback_metrics))

    model = Logs(lambda m, b, i: m.log("loss", float(i)))
    trainer = trainer_with(callbacks=Reads())
    trainer.fit(model, numbers())
    assert [(one, other) for one, other in seen] == [
        ({"loss": torch.tensor(float(i))}, {"loss": torch.tensor(float(i))}) for i in range(3)
    ]
    assert trainer.callback_metrics == {"loss": torch.tensor(2.0)}


def test_sanity_check_values_are_not_logged() -> None:
    memory = Memory()
    model = Logs(validate=lambda m, b, i: m.log("val", 1.0, prog_bar=True, on_step=True))
    seen: list[dict[str, Any]] = []

    class Reads(Callback):
        def on_train_start(self, trainer: Trainer, module: Module) -> None:
            seen.extend([trainer.callback_metrics, dict(trainer.progress_bar_metrics)])

    trainer_with(memory, callbacks=Reads(), limit_train_batches=1).fit(model, numbers(), numbers())
    assert seen == [{}, {}]
    assert len(memory.of("val_step")) == 3


def test_two_runs_claim_two_versions(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    assert first.log_dir != second.log_dir
    assert sorted(path.name for path in (tmp_path / "stratagem_logs").iterdir()) == [
        "version_0",
        "version_1",
    ]
    named = CSVLogger(tmp_path, name="mine", version="best")
    assert named.log_dir == str(tmp_path / "mine" / "best")
    assert CSVLogger(tmp_path, name="mine", version=7).log_dir == str(
        tmp_path / "mine" / "version_7"
    )


def test_csv_logger_appends_to_an_existing_version(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=3)
    first.log_metrics({"a": 1.0}, 0)
    first.save()
    second = CSVLogger(tmp_path, version=3)
    second.log_metrics({"b": 2.0}, 1)
    second.save()
    second.log_metrics({"a": 3.0}, None)
    second.save()
    assert read(second.log_dir) == [
        {"step": "0", "a": "1.0", "b": ""},
        {"step": "1", "a": "", "b": "2.0"},
        {"step": "", "a": "3.0", "b": ""},
    ]


def test_hyperparameters_are_written_beside_the_values(tmp_path: Path) -> None:
    class Sized(Logs):
        def __init__(self, width: int, rate: float = 0.5, *, kind: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters(ignore="kind")

    memory, file = Memory(), CSVLogger(tmp_path)
    model = Sized(3)
    trainer_with([memory, file]).fit(model, numbers())
    assert memory.hyper_parameters == {"width": 3, "rate": 0.5}
    assert (model.hparams.width, model.hparams.rate) == (3, 0.5)
    saved = json.loads((Path(file.log_dir) / "hparams.json").read_text())
    assert saved == {"width": 3, "rate": 0.5}


def test_hyperparameters_may_have_keys_that_json_does_not_take(tmp_path: Path) -> None:
    file = CSVLogger(tmp_path)
    file.log_hyperparams({"sizes": [{("a", 1): 2, None: 3}], "folder": Path("x")})
    saved = json.loads((Path(file.log_dir) / "hparams.json").read_text())
    assert saved == {"sizes": [{"('a', 1)": 2, "None": 3}], "folder": "x"}


def test_csv_logger_keeps_the_bytes_of_names(tmp_path: Path) -> None:
    name = "Verlust_ü_" + os.fsdecode(b"\xff")
    for number in range(2):
        CSVLogger(tmp_path, version=0).log_metrics({name: 0.5, str(number): 1.0}, number)
    header = (tmp_path / "stratagem_logs" / "version_0" / "metrics.csv").read_bytes().split()[0]
    assert header == b"step,Verlust_\xc3\xbc_\xff,0,1"


def test_a_table_of_values_is_printed_in_the_encoding_of_stdout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    names = ["Verlust_ü", "recall[person]", "end[/x]"]
    model = Logs(validate=lambda m, batch, i: m.log_dict(dict.fromkeys(names, 0.5)))
    trainer_with().validate(model, numbers())
    screen.seek(0)
    shown = screen.read()
    for text in ("Verlust_\\xfc", "recall[person]", "end[/x]", "0.5"):
        assert text in shown, shown


def test_a_loggers_folder_is_made_only_when_something_is_written(tmp_path: Path) -> None:
    trainer_with(None, default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- printing


def test_print_prints_on_this_rank(capsys: pytest.CaptureFixture[str]) -> None:
    class Says(Logs):
        def on_train_start(self) -> None:
            self.print("hello", self.device, self.dtype)
            self.trainer.print("and again")

    trainer_with().fit(Says(), numbers())
    assert capsys.readouterr().out == "hello cpu torch.float32\nand again\n"


# ---------------------------------------------------------------- what cannot be logged


def logged_in_a_step(log: Callable[[Logs, Any, int], object]) -> str:
    with pytest.raises(UserCodeError) as caught:
        trainer_with().fit(Logs(log), numbers())
    return str(caught.value)


def test_a_value_that_is_not_one_number_is_refused() -> None:
    assert logged_in_a_step(lambda m, batch, i: m.log("x", batch)) == (
        "self.log('x', ...) expected a single number, received a tensor of shape (4,): reduce it "
        "first, for example by .mean()"
    )
    assert logged_in_a_step(lambda m, batch, i: m.log("x", "high")) == (
        "self.log('x', ...) expected a number, a tensor with one element or a torchmetrics Metric, "
        "received str"
    )


def test_an_unknown_reduction_is_refused() -> None:
    assert logged_in_a_step(lambda m, batch, i: m.log("x", 1.0, reduce_fx="median")) == (
        "self.log('x', reduce_fx='median'): expected one of 'mean', 'sum', 'max', 'min', or a "
        "function of a tensor"
    )


def test_one_name_takes_one_set_of_options() -> None:
    assert logged_in_a_step(lambda m, batch, i: m.log("x", 1.0, on_epoch=i == 0)) == (
        "self.log('x', ...) was called with other options before in this epoch; use one set of "
        "options for one name"
    )


def test_log_works_within_a_run_only() -> None:
    model = Logs()
    with pytest.raises(UserCodeError) as caught:
        model.log("x", 1.0)
    assert str(caught.value) == (
        "self.log('x', ...) works while a Trainer runs this model, in its steps and in hooks up to "
        "the end of an epoch (on_train_epoch_end, on_validation_epoch_end, on_test_epoch_end); "
        "later, use self.logger.log_metrics({...})"
    )
    trainer_with().fit(model, numbers())
    with pytest.raises(UserCodeError, match="works while a Trainer runs this model"):
        model.log("x", 1.0)


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end", "on_validation_end", "teardown"])
def test_log_outside_of_steps_raises(hook: str) -> None:
    late = type("Late", (Logs,), {hook: lambda self, *stage: self.log("late", 1.0)})()
    late.validation_step = lambda batch, batch_idx: None
    with pytest.raises(UserCodeError, match="works while a Trainer runs this model, in its steps"):
        trainer_with(num_sanity_val_steps=0).fit(late, numbers(), numbers())


def test_log_refuses_a_metric_with_several_values() -> None:
    class Both(MeanMetric):
        def compute(self) -> Any:
            return {"a": super().compute()}

    class LogsBoth(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.both.update(1.0)
            self.log("both", self.both, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UserCodeError) as caught:
        trainer_with().fit(LogsBoth(), numbers())
    assert str(caught.value) == (
        "self.log('both', Both(...)): expected a metric whose compute() returns a tensor with one "
        "element, received <class 'dict'>: log its parts, as in self.log_dict(metric.compute()) in "
        "on_train_epoch_end or on_validation_epoch_end"
    )


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric OfRare was called before")
def test_a_metric_that_has_nothing_to_compute_logs_nothing() -> None:
    class OfRare(MeanMetric):
        def compute(self) -> Any:
            return super().compute() if self.update_called else None

    class LogsRare(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.rare = OfRare()

        def on_train_epoch_end(self) -> None:
            if self.current_epoch:
                self.rare.update(2.0)
            self.log("rare", self.rare)

    memory = Memory()
    trainer_with(memory, max_epochs=2).fit(LogsRare(), numbers())
    assert memory.of("rare") == {5: 2.0}


def test_a_logger_needs_no_folder(tmp_path: Path) -> None:
    class Sends(Logger):
        sent: list[Any]

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.sent.append((step, dict(metrics)))

    logger = Sends()
    logger.sent = []
    trainer = Trainer(
        accelerator="cpu",
        logger=logger,
        max_epochs=1,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    model = Logs(lambda m, batch, i: m.log("mean", batch.mean()))
    trainer.fit(model, numbers())
    assert logger.sent[0] == (0, {"epoch": 0, "mean": 1.5})
    assert (logger.log_dir, trainer.log_dir) == ("", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert model.loggers == [logger]


def test_module_without_trainer_raises() -> None:
    with pytest.raises(UserCodeError) as caught:
        _ = Logs().trainer
    assert str(caught.value) == (
        "Logs is not attached to a Trainer: this works within trainer.fit, validate, test and "
        "predict only"
    )
    assert Logs().current_epoch == Logs().global_step == 0
    assert Logs().global_rank == Logs().local_rank == 0
    assert (Logs().logger, Logs().loggers) == (None, [])


def test_a_callback_may_log_through_the_module() -> None:
    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            module.log("from_callback", 3.0)

    trainer = trainer_with(callbacks=Ends())
    trainer.fit(Logs(), numbers())
    assert trainer.callback_metrics["from_callback"] == 3.0


def test_loaders_that_log_under_one_name_are_reduced_together() -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("value", float(dataloader_idx), add_dataloader_idx=False)

    one, three = DataLoader(torch.ones(4, 1), 4), DataLoader(torch.ones(12, 1), 4)  # type: ignore[arg-type, var-annotated]
    trainer = Trainer(accelerator="cpu", logger=False)
    values = trainer.validate(Two(), [one, three], verbose=False)
    assert values == [{"value": 0.75}, {"value": 0.75}]


def test_hooks_at_the_end_of_an_epoch_read_its_own_values(tmp_path: Path) -> None:
    """Not those of the epoch before, whichever logged them."""

    class Reads(Callback):
        def __init__(self) -> None:
            self.validated: list[float] = []
            self.trained: list[tuple[float, float]] = []

        def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
            if not trainer.sanity_checking:
                self.validated.append(float(trainer.callback_metrics["v"]))

        def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
            values = trainer.callback_metrics
            self.trained.append((float(values["t"]), float(values["v"])))

    class Logs(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("t", 10.0 * self.trainer.current_epoch + batch_idx, on_epoch=True)
            return self.layer(batch).mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("v", 100.0 * (self.trainer.current_epoch + 1) + batch_idx)

        def on_validation_epoch_end(self) -> None:
            self.log("doubled", 2 * self.trainer.callback_metrics.get("v", torch.tensor(0.0)))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    reads = Reads()
    batches: DataLoader[Any] = DataLoader(torch.ones(4, 1), batch_size=2)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=reads,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Logs(), batches, batches)
    assert reads.validated == [100.5, 200.5]
    assert reads.trained == [(0.5, 100.5), (10.5, 200.5)]
    assert trainer.callback_metrics["doubled"] == 401.0


def test_validation_results_are_separate_by_loader() -> None:
    class Logs(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"own{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)
            self.log("indexed", float(dataloader_idx))

        def on_validation_epoch_end(self) -> None:
            self.log("all", 7.0)

    batches: DataLoader[Any] = DataLoader(torch.ones(4, 1), batch_size=2)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.validate(Logs(), [batches, batches], verbose=False) == [
        {"own0": 0.0, "indexed/dataloader_idx_0": 0.0, "all": 7.0},
        {"own1": 1.0, "indexed/dataloader_idx_1": 1.0, "all": 7.0},
    ]


# -- values that lie on a device, as they are reduced there


@pytest.mark.parametrize("compiles_steps", [False, True])
@pytest.mark.parametrize(
    ("reduce_fx", "expected", "weight"),
    [
        ("mean", sum(range(51)) + 2 * sum(range(51, 150)), 51 + 2 * 99),
        ("sum", sum(range(150)), 0.0),
        ("max", 149.0, 0.0),
        ("min", 0.0, 0.0),
    ],
)
def test_an_epochs_value_is_of_all_its_tensors(
    reduce_fx: str, expected: float, weight: float, compiles_steps: bool
) -> None:
    """They are reduced in portions, or each at once; one counts as much as another."""
    options = LogOptions(False, True, None, None, reduce_fx, None, True)
    entry = MetricAccumulator(
        "a", options, on_step=False, on_epoch=True, compiles_steps=compiles_steps
    )
    for number in range(150):
        entry.add(torch.tensor(float(number)), weight=2 if number >= 51 else 1)
    summary = entry.summary()
    assert (summary.number, summary.weight) == (expected, weight)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.min, "min"),
        (torch.amax, "max"),
        (max, "max"),
        (torch.sum, "sum"),
        (torch.mean, "mean"),
    ],
)
def test_functions_that_have_a_name_are_reduced_over_ranks_as_the_name(
    function: Any, name: str
) -> None:
    summaries = []
    for reduce_fx in (function, name):
        options = LogOptions(False, True, None, None, reduce_fx, None, True)
        entry = MetricAccumulator("a", options, on_step=False, on_epoch=True, compiles_steps=False)
        for number in (3.0, 1.0, 2.0):
            entry.add(torch.tensor(number), weight=2)
        summaries.append(entry.summary())
    assert summaries[0] == summaries[1]
    assert summaries[0].reduce_fx == name


class WithoutInferenceMode(CPUAccelerator):
    """A device whose tensors do not work under inference mode."""

    inference_mode = False


@pytest.mark.parametrize(
    ("accelerator", "expected"), [(CPUAccelerator(), True), (WithoutInferenceMode(), False)]
)
def test_evaluation_uses_inference_mode_if_supported(
    tmp_path: Path, accelerator: CPUAccelerator, expected: bool
) -> None:
    seen = []

    def note(module: Logs, batch: Any, index: int) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    trainer = Trainer(accelerator=accelerator, devices=1, logger=False, default_root_dir=tmp_path)
    trainer.validate(
        Logs(validate=note), DataLoader(TensorDataset(torch.ones(2, 1))), verbose=False
    )
    assert seen == [(expected, False)] * 2
