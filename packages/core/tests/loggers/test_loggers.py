"""Loggers: what they are told, the CSV logger, names, and where a resumed run writes."""

from __future__ import annotations

import copy
import csv
import dataclasses
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_runs import Learner, last_of, numbers, trainer_in
from torch import Tensor, nn

from stratagem import Callback, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint.catalog import describe_checkpoint
from stratagem.discovery import LoggerSpec
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError, UnknownNameError
from stratagem.loggers import CSVLogger, Logger


def steps_of(folder: str | Path) -> list[str]:
    """Return the steps in a CSV file whose rows hold a loss."""
    with (Path(folder) / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row["loss"]]


class Sends(Logger):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        self.told.append(("begin", run_id, resumed_at))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.told.append(("row", step))

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        self.told.append(("graph", type(model).__name__))

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.told.append(("saved", Path(checkpoint_callback.best_model_path).exists()))


class Sink:
    """Takes values, and is no Logger."""

    version = "7"

    def __init__(self, folder: Path) -> None:
        self.save_dir = folder
        self.rows: list[Any] = []
        self.hyperparameters: Any = None
        self.status = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows += [(metrics["loss"], step)] if "loss" in metrics else []

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.hyperparameters = params

    def finalize(self, status: str) -> None:
        self.status = status


def test_an_object_that_takes_values_is_a_logger(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "sink")
    trainer = trainer_in(tmp_path, sink)
    trainer.fit(Learner(), numbers())
    assert [step for _, step in sink.rows] == [0, 1]
    assert (sink.hyperparameters, sink.status) == ({"rate": 0.5}, "success")
    logger: Any = trainer.logger
    assert isinstance(trainer.logger, Logger)
    assert (logger.version, logger.name, logger.rows) == ("7", None, sink.rows)
    assert Path(last_of(trainer)).parent == tmp_path / "sink" / "checkpoints"
    again: Any = pickle.loads(pickle.dumps(copy.copy(logger)))
    assert again.rows == sink.rows


def test_a_value_called_step_is_the_step_of_its_row(tmp_path: Path) -> None:
    class Counts(Learner):
        def on_train_epoch_end(self) -> None:
            self.log_dict({"step": 10 * (self.current_epoch + 1), "loss": 1.0})

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).square().mean()  # type: ignore[no-any-return]

    sink = Sink(tmp_path)
    trainer_in(tmp_path, sink, max_epochs=2).fit(Counts(), numbers())
    assert sink.rows == [(1.0, 10), (1.0, 20)]


@pytest.mark.parametrize("wrong", [CSVLogger, object()])
def test_object_without_log_metrics_is_refused_as_logger(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"an object with log_metrics.metrics, step."):
        trainer_in(tmp_path, wrong)


# ---------------------------------------------------------------- a resumed run


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, True)
    first.fit(Learner(), numbers())
    trainer_in(tmp_path, True).fit(Learner(), numbers())  # another run, in between
    resumed = trainer_in(tmp_path, True, max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=last_of(first))
    assert resumed.log_dir == first.log_dir
    assert Path(first.log_dir).name == "version_0"
    assert steps_of(first.log_dir) == ["0", "1", "2", "3"]
    assert Path(last_of(resumed)).parent == Path(last_of(first)).parent
    assert sorted(path.name for path in Path(first.log_dir).parent.iterdir()) == [
        "version_0",
        "version_1",
    ]


def test_resumed_run_with_missing_log_dir_gets_a_new_version(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, True)
    first.fit(Learner(), numbers())
    (Path(first.log_dir) / ".run").unlink()
    resumed = trainer_in(tmp_path, True, max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=last_of(first))
    assert Path(resumed.log_dir).name == "version_1"


def test_given_logger_version_overrides_the_resumed_one(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, CSVLogger(tmp_path))
    first.fit(Learner(), numbers())
    resumed = trainer_in(tmp_path, CSVLogger(tmp_path, version="again"), max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=last_of(first))
    assert Path(resumed.log_dir).name == "again"
    # A run whose folder was given is found without it, too.
    more = trainer_in(tmp_path, CSVLogger(tmp_path), max_epochs=3)
    more.fit(Learner(), numbers(), ckpt_path=last_of(resumed))
    assert Path(more.log_dir).name == "again"


def test_the_name_of_a_run_in_a_checkpoint_is_only_compared(tmp_path: Path) -> None:
    """Nothing that a checkpoint holds becomes a part of a path."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".run").write_text("../../outside\n")
    first = trainer_in(tmp_path, True)
    first.fit(Learner(), numbers())
    saved = first.checkpoint_writer.load(last_of(first))
    saved["run"] = "../../outside"
    hostile = tmp_path / "hostile.ckpt"
    first.checkpoint_writer.save(saved, hostile)
    resumed = trainer_in(tmp_path, True, max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=hostile)
    assert Path(resumed.log_dir).name == "version_1"
    assert [path.name for path in outside.iterdir()] == [".run"]


def test_loggers_receive_run_graph_rows_and_checkpoints(tmp_path: Path) -> None:
    one, two = Sends(), Sends()
    trainer = trainer_in(tmp_path, [one, two])
    trainer.fit(Learner(), numbers())
    run_id = trainer.run.resume_point.run_id
    assert one.told == two.told
    assert one.told[:2] == [("begin", run_id, None), ("graph", "Learner")]
    assert one.told.count(("saved", True)) == 1
    again = Sends()
    trainer_in(tmp_path, again, max_epochs=2).fit(Learner(), numbers(), ckpt_path=last_of(trainer))
    assert again.told[0] == ("begin", run_id, 2)


def table(folder: str | Path) -> list[str]:
    return (Path(folder) / "metrics.csv").read_text().split()


def test_a_row_that_was_cut_short_is_removed_before_the_next_one(tmp_path: Path) -> None:
    for torn in ("1,0.2", "1", "1,0.25\r"):
        logger = CSVLogger(tmp_path, version=f"of{len(torn)}{torn[-1:].strip()!r}")
        logger.log_metrics({"loss": 0.5}, 0)
        with (Path(logger.log_dir) / "metrics.csv").open("a") as file:
            file.write(torn)
        again = CSVLogger(tmp_path, version=logger.version)
        again.log_metrics({"loss": 0.125}, 2)
        assert table(again.log_dir) == ["step,loss", "0,0.5", "2,0.125"]


def test_a_header_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version="one")
    Path(logger.log_dir).mkdir(parents=True)
    (Path(logger.log_dir) / "metrics.csv").write_text("step,lo")
    logger.log_metrics({"loss": 0.5}, 0)
    assert table(logger.log_dir) == ["step,loss", "0,0.5"]


def begun(folder: Path, run_id: str, resumed_at: int | None = None, **options: Any) -> CSVLogger:
    logger = CSVLogger(folder, **options)
    logger.begin_run(run_id, resumed_at)
    return logger


RUN = "0123456789abcdef"


def test_a_resumed_run_moves_the_rows_after_its_checkpoint(tmp_path: Path) -> None:
    first = begun(tmp_path, RUN)
    first.log_rows([(step, {"loss": float(step)}) for step in range(6)])
    first.finalize("failed")
    for _ in range(2):
        resumed = begun(tmp_path, RUN, 4)
        assert resumed.log_dir == first.log_dir
        resumed.log_rows([(4, {"loss": 40.0}), (5, {"loss": 50.0, "more": 1.0})])
        resumed.finalize("failed")
    assert table(first.log_dir) == [
        *("step,loss,more", "0,0.0,", "1,1.0,", "2,2.0,", "3,3.0,", "4,40.0,", "5,50.0,1.0"),
    ]
    moved = (Path(first.log_dir) / "metrics.cut.csv").read_text().split()
    assert moved == ["step,loss", "4,4.0", "5,5.0", "step,loss,more", "4,40.0,", "5,50.0,1.0"]


def test_a_resumed_run_does_not_repeat_rows_of_the_step_before_its_checkpoint(
    tmp_path: Path,
) -> None:
    """The step's own values and its validation come after the checkpoint, and are logged again."""
    first = begun(tmp_path, RUN)
    first.log_rows([(2, {"loss": 2.0}), (3, {"loss": 3.0, "lr": 0.1}), (3, {"val": 0.5})])
    resumed = begun(tmp_path, RUN, 4)
    resumed.log_rows([(3, {"loss": 3.0}), (3, {"val": 0.5}), (3, {"val": 0.25})])
    assert table(first.log_dir) == [
        "step,loss,lr,val",
        "2,2.0,,",
        "3,3.0,0.1,",
        *("3,,,0.5", "3,,,0.25"),
    ]


def test_rows_on_another_axis_are_moved_by_their_optimizer_step(tmp_path: Path) -> None:
    """Batches of a validation are numbered from 0, and an axis of the user's has any numbers."""
    name = "trainer/optimizer_step"
    first = begun(tmp_path, RUN, prefix="run")
    first.log_rows([(900, {"val": 1.0, name: 2}), (0, {"val": 2.0, name: 3})])
    first.log_rows([(4, {"loss": 4.0}), (1, {"val": 4.0, name: 4})])
    resumed = begun(tmp_path, RUN, 4, prefix="run")
    resumed.log_rows([(0, {"val": 2.0, name: 3}), (1, {"val": 3.0, name: 3})])
    resumed.log_rows([(4, {"loss": 5.0})])
    resumed.log_rows([(0, {"val": 2.0, name: 3})])
    assert table(first.log_dir) == [
        f"step,run-val,run-{name},run-loss",
        *("900,1.0,2,", "0,2.0,3,"),  # before the checkpoint
        *("1,3.0,3,", "4,,,5.0"),  # written by the resumed run, which repeated a row
        "0,2.0,3,",  # the same again, after the next step
    ]
    moved = (Path(first.log_dir) / "metrics.cut.csv").read_text().split()
    assert moved[1:] == ["4,,,4.0", "1,4.0,4,"]


def test_a_row_that_is_no_csv_stays_when_a_run_resumes(tmp_path: Path) -> None:
    first = begun(tmp_path, RUN)
    first.log_metrics({"loss": 0.5}, 0)
    with (Path(first.log_dir) / "metrics.csv").open("a") as file:
        file.write("\n" + "x" * 200_000 + "\n\0\0\n3," + "9" * 200_000 + "\n")
    resumed = begun(tmp_path, RUN, 1)
    resumed.log_metrics({"loss": 0.25}, 1)
    rows = table(first.log_dir)
    assert (len(rows), rows[1], rows[-1]) == (5, "0,0.5", "1,0.25")
    moved = (Path(first.log_dir) / "metrics.cut.csv").read_text().split()
    assert moved[1].startswith("3,999")  # longer than the csv module reads


def test_rows_of_the_step_before_a_checkpoint_are_each_matched_once(tmp_path: Path) -> None:
    first = begun(tmp_path, RUN)
    first.log_rows([(3, {"loss": 3.0}), (3, {"val": 0.5})])
    resumed = begun(tmp_path, RUN, 4)
    resumed.log_metrics({"started": 1.0}, 4)
    resumed.log_rows([(3, {"loss": 3.0}), (3, {"val": 0.5}), (3, {"val": 0.5})])
    assert table(first.log_dir) == [
        *("step,loss,val,started", "3,3.0,,", "3,,0.5,"),
        *("4,,,1.0", "3,,0.5,"),
    ]
    new = begun(tmp_path, RUN, 4)
    new.log_metrics({"started": 2.0}, 4)  # reads the rows of step 3
    new.begin_run("f" * 16)
    new.log_metrics({"loss": 3.0}, 3)
    assert table(first.log_dir)[-2:] == ["4,,,2.0", "3,3.0,,"]


def test_a_value_with_the_name_of_the_optimizer_step_is_the_optimizer_step(tmp_path: Path) -> None:
    class Logs(Learner):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("trainer/optimizer_step", 1000.0 + self.global_step)
            return super().training_step(batch, batch_idx)

    trainer = trainer_in(tmp_path, True)
    trainer.fit(Logs(), numbers())
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [row["trainer/optimizer_step"] for row in rows]


def test_nonfinite_step_value_is_logged_at_the_optimizer_step(tmp_path: Path) -> None:
    class Logs(Learner):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("step", float("nan") if batch_idx else float("inf"))
            return super().training_step(batch, batch_idx)

    trainer = trainer_in(tmp_path, True)
    said = r"self.log\('step', (nan|inf)\): expected a finite number.*at the optimizer step [01]$"
    with pytest.warns(UserWarning, match=said):
        trainer.fit(Logs(), numbers())
    assert steps_of(trainer.log_dir) == ["0", "1"]


def test_rows_of_validation_and_of_an_axis_of_ones_own_stay_when_a_run_resumes(
    tmp_path: Path,
) -> None:
    class Validates(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("of_batch", float(batch_idx), on_step=True, on_epoch=False)

        def on_train_epoch_end(self) -> None:
            self.log_dict({"step": 1000.0 * (1 + self.current_epoch), "ended": 1.0})

    class Kept(Callback):
        """Keeps what is on disk at the beginning of the second epoch's second step."""

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = trainer_in(tmp_path / "whole", True, callbacks=[saver, Kept()], max_epochs=3)
    whole.fit(Validates(), numbers(), numbers(50))
    expected = table(whole.log_dir)
    assert any(row.startswith("49,") for row in expected)
    assert sum(row.startswith(("1000,", "2000,", "3000,")) for row in expected) == 3
    for folder, step in (("whole", 6), ("killed", 1), ("whole", 4), ("killed", 2), ("killed", 3)):
        copy = tmp_path / f"{folder}-{step}"
        shutil.copytree(tmp_path / folder, copy)
        (start,) = copy.rglob(f"step={step}.ckpt")
        for ended in copy.rglob(".writer"):
            ended.unlink()  # as if the process had been killed
        resumed = trainer_in(copy, True, max_epochs=3)
        resumed.fit(Validates(), numbers(), numbers(50), ckpt_path=start)
        assert Path(resumed.log_dir).name == "version_0"
        assert table(resumed.log_dir) == expected, (folder, step)


def test_only_loggers_that_ask_receive_the_optimizer_step_of_rows_on_another_axis(
    tmp_path: Path,
) -> None:
    class Validates(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("of_batch", float(batch_idx), on_step=True, on_epoch=False)

    class Rows(Logger):
        optimizer_step_name: str | None = None

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

    asking, other = Rows(), Rows()
    asking.optimizer_step_name = "taken"
    trainer = trainer_in(tmp_path, [asking, other])
    trainer.fit(Validates(), numbers(4), numbers(6))
    assert [(step, row) for step, row in other.rows if "of_batch" in row] == [
        (index, {"of_batch": float(index), "epoch": 0}) for index in range(3)
    ]
    assert [(step, row) for step, row in asking.rows if "of_batch" in row] == [
        (index, {"of_batch": float(index), "epoch": 0, "taken": 1}) for index in range(3)
    ]
    assert not any("taken" in row for _, row in asking.rows if "of_batch" not in row)


def test_run_resumed_by_last_continues_its_log(
    tmp_path: Path,
) -> None:
    """The checkpoint is found after the log's folder is chosen, and says which rows are older."""

    def trainer(folder: Path, *callbacks: Callback) -> Trainer:
        return trainer_in(
            folder, CSVLogger(folder, version="one"), callbacks=[*callbacks], max_epochs=3
        )

    class Kept(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.logger.log_metrics({"loss": 9.0}, 2)  # type: ignore[union-attr]
                trainer.logger.log_metrics({"loss": 9.0}, 3)  # type: ignore[union-attr]
                shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    whole = trainer(tmp_path / "whole", Kept())
    whole.fit(Learner(), numbers())
    resumed = trainer(tmp_path / "killed")
    resumed.fit(Learner(), numbers(), ckpt_path="last")
    assert Path(resumed.log_dir).parent.parent == tmp_path / "killed"
    expected = [row for row in table(whole.log_dir) if ",9.0" not in row]
    assert table(resumed.log_dir) == expected
    manifests = [describe_checkpoint(last_of(trainer)).manifest for trainer in (whole, resumed)]
    assert len({manifest.run for manifest in manifests if manifest is not None}) == 1


def test_kill_after_a_save_loses_no_logged_row(tmp_path: Path) -> None:
    """A kill right after a save loses no row."""
    killed: dict[int, list[str]] = {}

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
            if step := trainer.global_step:
                there = (Path(trainer.log_dir) / "metrics.csv").exists()
                killed[step] = steps_of(trainer.log_dir) if there else []

    saver = ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    first = trainer_in(tmp_path, True, callbacks=[Looks(), saver], max_epochs=2)
    first.fit(Learner(), numbers(6))
    assert list(killed) == [1, 2, 3, 4, 5]
    for step, rows in killed.items():
        checkpoint = torch.load(tmp_path / "saved" / f"step={step}.ckpt", weights_only=True)
        kept = [str(step - 1)] * bool(checkpoint["ranks"][0]["epoch"]["row"])
        assert {*rows, *kept} == {str(before) for before in range(step)}


def test_rows_of_another_run_in_a_folder_that_was_given_stay(tmp_path: Path) -> None:
    begun(tmp_path, RUN, version="one").log_rows([(7, {"loss": 0.5})])
    other = begun(tmp_path, "f" * 16, 4, version="one")
    other.log_rows([(4, {"loss": 0.25})])
    assert table(other.log_dir) == ["step,loss", "7,0.5", "4,0.25"]


def test_a_second_run_from_the_same_checkpoint_gets_a_log_of_its_own(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, True)
    first.fit(Learner(), numbers())
    start = last_of(first)
    logs = []
    for _ in range(2):
        branch = trainer_in(tmp_path, True, max_epochs=2)
        branch.fit(Learner(), numbers(), ckpt_path=start)
        logs.append(branch.log_dir)
    assert [Path(log).name for log in logs] == ["version_0", "version_1"]
    assert steps_of(logs[0]) == ["0", "1", "2", "3"]
    assert steps_of(logs[1]) == ["2", "3"]


def test_a_log_that_another_process_writes_to_is_not_taken(tmp_path: Path) -> None:
    first = begun(tmp_path, RUN)
    first.log_metrics({"loss": 0.5}, 0)
    writing = (
        "import sys; from stratagem.loggers import CSVLogger; logger = CSVLogger(sys.argv[1])\n"
        f"logger.begin_run({RUN!r}, 1); print(logger.version, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", writing, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "1\n"  # this process writes to version_0
    (Path(first.log_dir) / ".writer").unlink()
    assert begun(tmp_path, RUN, 1).version == 0
    other.communicate("\n")
    assert other.returncode == 0


class Full(CSVLogger):
    """A CSVLogger whose disk is full while a file says so."""

    def _write(self, rows: Any) -> None:
        if (Path(str(self.save_dir)) / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
        super()._write(rows)


def test_logger_with_full_disk_warns_once_and_training_continues(tmp_path: Path) -> None:
    class Fills(Learner):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch in (1, 2):
                (tmp_path / "full").touch()
            else:
                (tmp_path / "full").unlink(missing_ok=True)

    trainer = trainer_in(tmp_path, Full(tmp_path), max_epochs=4)
    with pytest.warns(UserWarning, match="Full cannot write") as said:
        trainer.fit(Fills(), numbers())
    (warning,) = said
    assert "metrics.csv' (OSError: No space left on device): training goes on" in str(
        warning.message
    )
    assert trainer.global_step == 8
    assert steps_of(trainer.log_dir) == ["0", "1", "6", "7"]


def test_a_log_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    class Removes(Learner):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                shutil.rmtree(tmp_path / "stratagem_logs")

    trainer = trainer_in(tmp_path, CSVLogger(tmp_path), max_epochs=3)
    with pytest.warns(UserWarning, match="CSVLogger cannot write .*metrics.csv' .FileNotFoundErr"):
        trainer.fit(Removes(), numbers())
    assert trainer.global_step == 6
    assert steps_of(trainer.log_dir)[-2:] == ["4", "5"]


# ---------------------------------------------------------------- CSV


def test_rows_are_held_back_as_asked_and_names_have_their_prefix(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, prefix="a", flush_logs_every_n_steps=2)
    logger.log_metrics({"loss": torch.tensor(0.5)}, 0)  # type: ignore[dict-item]
    assert not (tmp_path / "version_0" / "metrics.csv").exists()
    logger.log_metrics({"loss": 0.25}, 1)
    table = (tmp_path / "version_0" / "metrics.csv").read_text().split()
    assert table == ["step,a-loss", "0,0.5", "1,0.25"]
    logger.log_metrics({"loss": 0.125}, 2)
    logger.finalize("success")
    assert (tmp_path / "version_0" / "metrics.csv").read_text().split()[-1] == "2,0.125"
    assert (logger.name, logger.version, logger.root_dir) == ("", 0, str(tmp_path))
    assert logger.experiment is logger


def test_every_row_of_a_run_goes_through_log_metrics_of_a_subclass(tmp_path: Path) -> None:
    class WithoutEpochs(CSVLogger):
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            kept = {name: value for name, value in metrics.items() if name != "epoch"}
            super().log_metrics(kept, step)

    logger = WithoutEpochs(tmp_path / "subclass")
    trainer_in(tmp_path, [logger]).fit(Learner(), numbers())
    rows = table(logger.log_dir)
    assert "loss" in rows[0]
    assert "epoch" not in rows[0]
    plain = trainer_in(tmp_path, True)
    plain.fit(Learner(), numbers())
    assert steps_of(logger.log_dir) == steps_of(plain.log_dir)


def test_rows_of_a_run_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = CSVLogger._append

    def counted(logger: CSVLogger, rows: Any) -> None:
        writes.append(len(rows))
        write(logger, rows)

    monkeypatch.setattr(CSVLogger, "_append", counted)
    logger = CSVLogger(tmp_path)
    logger.log_rows([(step, {"loss": 0.5}) for step in range(3)])
    logger.log_metrics({"loss": 0.5}, 3)
    assert writes == [3, 1]


def test_csv_logger_refuses_zero_flush_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"flush_logs_every_n_steps=0\): expected a whole"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_a_csv_logger_says_which_logger_takes_pictures(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(AttributeError) as caught:
        logger.experiment.add_image("sample", [[0]])
    assert str(caught.value) == (
        "'CSVLogger' has no 'add_image': it takes values and hyperparameters. "
        "Trainer(logger='tensorboard') has an experiment that takes pictures and texts too "
        "(pip install 'stratagem-core[tensorboard]')"
    )
    assert pickle.loads(pickle.dumps(logger)).save_dir == tmp_path
    assert copy.deepcopy(logger).save_dir == tmp_path


def test_a_csv_logger_refuses_a_url(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CSVLogger("s3://bucket/logs")
    assert str(caught.value) == (
        "CSVLogger(save_dir='s3://bucket/logs'): expected a local folder, received a URL: a store "
        "of objects takes no rows one by one. Log to a local folder; checkpoints go to a URL by "
        "ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)"
    )
    with pytest.raises(ConfigurationError, match="a URL of which pathlib has taken a slash"):
        CSVLogger(Path("s3://bucket/logs"))
    assert Path(CSVLogger(f"file://{tmp_path}", name="").log_dir).parent == tmp_path


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


@pytest.mark.parametrize("given", [{"rate": 0.1}, Namespace(rate=0.1), Settings()])
def test_hyperparameters_come_in_any_of_their_forms(given: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams(given)
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text()) == {"rate": 0.1}
    with pytest.raises(ConfigurationError, match="expected a dict, an argparse"):
        logger.log_hyperparams(3)


# ---------------------------------------------------------------- names and packages


def test_a_logger_is_chosen_by_its_name(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, ["csv", Sends()])
    first = trainer.loggers[0]
    assert isinstance(first, CSVLogger)
    assert first.save_dir == tmp_path
    with pytest.raises(
        UnknownNameError, match=r"unknown logger 'tensorbord'\. Did you mean 'tenso"
    ):
        trainer_in(tmp_path, "tensorbord")


def test_a_logger_of_a_plugin_is_chosen_by_its_name(tmp_path: Path) -> None:
    registry = get_registry()
    registry.add(LoggerSpec(name="sends", target=Sends, api_version=1))
    try:
        assert isinstance(trainer_in(tmp_path, "sends").logger, Sends)
    finally:
        registry.remove("logger", "sends")
