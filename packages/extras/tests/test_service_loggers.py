"""Loggers that write through other libraries."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logged_runs import Learner, last_of, numbers, trainer_in
from torch import nn

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.discovery import require_package
from stratagem.errors import ConfigurationError, MissingPackageError
from stratagem.loggers import Logger
from stratagem_extras.loggers.sdk_logger import DummyExperiment, SDKLogger
from stratagem_extras.loggers.tensorboard_logger import TensorBoardLogger
from stratagem_extras.loggers.uploads import Upload, Uploads
from stratagem_extras.loggers.wandb_logger import WandbLogger

SESSION = "its SDK is not installed here; `nox -s loggers` runs this"


def test_a_missing_package_is_an_error_before_anything_runs() -> None:
    class Needs(SDKLogger):
        package = "no_such_package_anywhere"
        extra = "tensorboard"

        def _start(self) -> Any:
            raise AssertionError

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            raise AssertionError

    with pytest.raises(
        MissingPackageError,
        match=r"Needs needs the package 'no_such_package_anywhere', which is not installed here: "
        r"pip install 'stratagem-core\[tensorboard\]'",
    ) as caught:
        Needs()
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ConfigurationError)
    require_package("it", "json", "tensorboard")


@pytest.mark.parametrize(("last", "is_repeated"), [(7, True), (4, True), (3, False), (None, False)])
def test_wandb_logger_warns_of_steps_that_its_run_has_already(
    last: int | None, is_repeated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    summary = {} if last is None else {"trainer/global_step": last}
    run = SimpleNamespace(
        id="abc", resumed=True, summary=summary, define_metric=lambda *_, **__: None
    )
    stub = SimpleNamespace(run=None, init=lambda **_: run, __spec__=None)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WandbLogger(save_dir=tmp_path).begin_run("abc", resumed_at=4)
    assert [str(one.message) for one in caught] == is_repeated * [
        f"WandbLogger: the run 'abc' has values up to step {last}, and the fit resumes at step 4. "
        "W&B keeps them, so that the steps from there on will be there twice: pass id= for a run "
        "of its own"
    ]


def test_loggers_import_no_sdk_and_trainer_imports_no_logger() -> None:
    code = """
import sys
from stratagem import Trainer
from stratagem.loggers import Logger
Trainer(accelerator="cpu", logger=False)
import stratagem_extras.loggers.wandb_logger, stratagem_extras.loggers.mlflow_logger
import stratagem_extras.loggers.comet_logger, stratagem_extras.loggers.tensorboard_logger
import stratagem_extras.loggers.neptune_logger
import stratagem.cli, stratagem_extras.cli.commands
print({"jsonargparse", "tensorboard", "mlflow", "wandb", "comet_ml", "neptune"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_rank_that_does_not_write_has_an_experiment_that_takes_every_call(
    tmp_path: Path,
) -> None:
    class Counting(SDKLogger):
        package = "json"

        def _start(self) -> Any:
            return []

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            self.experiment.append(metrics)

    logger = Counting()
    logger.on_rank_zero = False
    assert isinstance(logger.experiment, DummyExperiment)
    logger.experiment.add_image("a", [[0]], step=3)
    logger.experiment["a"].append(1.0)
    logger.experiment["b"] = 2
    assert list(logger.experiment) == []
    logger.on_rank_zero = True
    logger.log_metrics({"a": 1.0})
    assert list(logger.experiment) == [{"a": 1.0}]
    again = pickle.loads(pickle.dumps(logger.__getstate__()))
    assert again["_experiment"] is None


@pytest.mark.parametrize(
    ("log_model", "sent"),
    [
        (False, []),
        (True, [("b.ckpt", 0.25, ["latest", "best"])]),
        ("all", [("a.ckpt", 0.5, ["latest", "best"]), ("b.ckpt", 0.25, ["latest", "best"])]),
    ],
)
def test_log_model_sets_the_time_of_uploads(
    log_model: Any, sent: list[Any], tmp_path: Path
) -> None:
    class Saver(ModelCheckpoint):
        """One that has saved what the test says."""

        best = ""
        values: dict[str, float] = {}  # noqa: RUF012
        best_model_path = property(lambda self: self.best)
        best_k_models = property(lambda self: self.values)
        kept_paths = property(lambda self: list(self.values))

    taken: list[Upload] = []
    uploads, saver = Uploads(log_model, taken.append), Saver(monitor="loss")
    for name, value in (("a.ckpt", 0.5), ("b.ckpt", 0.25)):
        (tmp_path / name).write_text(name)
        saver.best, saver.values = str(tmp_path / name), {str(tmp_path / name): value}
        uploads.saved(saver)
        uploads.saved(saver)
    uploads.end()
    uploads.end()
    assert [(each.path.name, each.score, each.aliases) for each in taken] == sent
    assert all(each.saver["monitor"] == "loss" for each in taken)


def tensorboard_logger() -> Logger:
    return TensorBoardLogger("logs", version=0)


def tensorboard_rows(logger: Logger) -> list[tuple[int | None, dict[str, float]]]:
    """Return what TensorBoard would show, by step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        shown = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
        shown.Reload()
    events = [
        (event.wall_time, event.step, tag, event.value)
        for tag in shown.Tags()["scalars"]
        for event in shown.Scalars(tag)
    ]
    rows: dict[int, dict[str, float]] = {}
    for _, step, tag, value in sorted(events):
        rows.setdefault(step, {})[tag] = value
    return list(rows.items())


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard", reason=SESSION)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_purges_steps_after_the_resumed_checkpoint(tmp_path: Path) -> None:
    def logger_of(epochs: int, path: str | None) -> Logger:
        logger = TensorBoardLogger(tmp_path, version="one")
        trainer = trainer_in(tmp_path, logger, max_epochs=epochs)
        trainer.fit(Learner(), numbers(), ckpt_path=path)
        return logger

    first = logger_of(1, None)
    first.log_metrics({"loss": 9.0}, 5)  # after the checkpoint, before the run was killed
    first.finalize("failed")
    rows = tensorboard_rows(logger_of(2, "last"))
    assert [step for step, row in rows if "loss" in row] == [0, 1, 2, 3]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_a_resumed_run_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard sorts names as text. These end in 8, 9 and 10, and begin in the same second.
    monkeypatch.setattr(event_file_writer._global_uid, "_value", 8)
    first = trainer_in(tmp_path, "tensorboard", max_epochs=1)
    first.fit(Learner(), numbers())
    assert first.logger is not None
    first.logger.log_metrics({"loss": 9.0}, 5)  # after the checkpoint, before the run was killed
    first.logger.finalize("failed")
    resumed = trainer_in(tmp_path, "tensorboard", max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=last_of(first))
    assert resumed.log_dir == first.log_dir
    assert resumed.logger is not None
    rows = tensorboard_rows(resumed.logger)
    assert [step for step, row in rows if "loss" in row] == [0, 1, 2, 3]
    hparams = json.loads((Path(first.log_dir) / "hparams.yaml").read_text())
    assert hparams == {"rate": 0.5}


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_refuses_a_url() -> None:
    with pytest.raises(ConfigurationError, match=r"TensorBoardLogger\(save_dir='gs://b/logs'\)"):
        TensorBoardLogger("gs://b/logs")


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_takes_hyperparameters_of_any_kind(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name=None, default_hp_metric=False, sub_dir="sub")
    given = {"a": Namespace(b=[1, 2]), "layer": nn.Linear, "tensor": torch.zeros(2), 7: None}
    logger.log_hyperparams(given, {"score": torch.tensor(0.5)})
    logger.finalize("success")
    assert tensorboard_rows(logger) == [(0, {"score": 0.5})]
    text = json.loads((tmp_path / "version_0" / "sub" / "hparams.yaml").read_text())
    assert text["a"] == {"b": [1, 2]}


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_log_graph_writes_the_graph(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace
        trainer_in(tmp_path, logger, enable_checkpointing=False).fit(Learner(), numbers())
    file = next(Path(logger.log_dir).glob("events*"))
    assert b"/layer/Linear" in file.read_bytes() or b"aten::linear" in file.read_bytes()
    model = Learner()
    model.example_input_array = None
    with pytest.warns(UserWarning, match="the model has no example_input_array, so its graph"):
        logger.log_graph(model)
    model.example_input_array = {"x": 1}
    with pytest.warns(UserWarning, match="the model cannot be traced with dict {'x': 1}"):
        logger.log_graph(model)


@pytest.mark.usefixtures("tensorboard")
def test_pictures_go_through_the_experiment(tmp_path: Path) -> None:
    class Draws(Callback):
        def on_train_end(self, trainer: Trainer, module: Module) -> None:
            assert trainer.logger is not None
            trainer.logger.experiment.add_text("said", "hello", 3)
            assert module.loggers == trainer.loggers

    logger = TensorBoardLogger(tmp_path)
    trainer_in(tmp_path, logger, callbacks=[Draws()], enable_checkpointing=False).fit(
        Learner(), numbers()
    )
    assert b"hello" in b"".join(file.read_bytes() for file in Path(logger.log_dir).glob("events*"))
