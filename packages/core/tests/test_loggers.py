"""Loggers that write through other libraries, and where a resumed run writes."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.discovery import LoggerSpec
from stratagem.discovery.installed import require_package
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError, MissingPackageError, UnknownNameError
from stratagem.loggers import CSVLogger, Logger, TensorBoardLogger
from stratagem_extras.loggers.sdk_logger import DummyExperiment, SDKLogger
from stratagem_extras.loggers.uploads import Upload, Uploads

SESSION = "its SDK is not installed here; `nox -s loggers` runs this"


class Learner(Module):
    """Logs its loss; has hyperparameters."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)
        self.example_input_array = torch.ones(2, 1)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.layer(batch)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).square().mean()
        self.log("loss", loss.detach(), on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01)


def numbers(count: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).unsqueeze(1), batch_size=2)  # type: ignore[arg-type]


def trainer_in(folder: Path, logger: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu", **options}
    return Trainer(default_root_dir=folder, devices=1, logger=logger, **options)


def steps_of(folder: str | Path) -> list[str]:
    """Return the steps in a CSV file whose rows hold a loss."""
    with (Path(folder) / "metrics.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file) if row["loss"]]


def last_of(trainer: Trainer) -> str:
    saver = trainer.checkpoint_callback
    assert saver is not None
    return saver.best_model_path


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
def test_what_takes_no_values_is_no_logger(wrong: Any, tmp_path: Path) -> None:
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


def test_a_resumed_run_whose_folder_is_gone_gets_a_new_one(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, True)
    first.fit(Learner(), numbers())
    (Path(first.log_dir) / ".run").unlink()
    resumed = trainer_in(tmp_path, True, max_epochs=2)
    resumed.fit(Learner(), numbers(), ckpt_path=last_of(first))
    assert Path(resumed.log_dir).name == "version_1"


def test_a_version_that_was_given_goes_before_that_of_a_resumed_run(tmp_path: Path) -> None:
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


def test_loggers_are_told_of_run_graph_rows_and_checkpoints(tmp_path: Path) -> None:
    one, two = Sends(), Sends()
    trainer = trainer_in(tmp_path, [one, two])
    trainer.fit(Learner(), numbers())
    run_id = trainer.run.run_id
    assert one.told == two.told
    assert one.told[:2] == [("begin", run_id, None), ("graph", "Learner")]
    assert one.told.count(("saved", True)) == 1
    again = Sends()
    trainer_in(tmp_path, again, max_epochs=2).fit(Learner(), numbers(), ckpt_path=last_of(trainer))
    assert again.told[0] == ("begin", run_id, 2)


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


def test_a_csv_logger_refuses_what_it_cannot_mean(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- checkpoints that are sent


@pytest.mark.parametrize(
    ("log_model", "sent"),
    [
        (False, []),
        (True, [("b.ckpt", 0.25, ["latest", "best"])]),
        ("all", [("a.ckpt", 0.5, ["latest", "best"]), ("b.ckpt", 0.25, ["latest", "best"])]),
    ],
)
def test_checkpoints_are_sent_when_they_are_to_be(
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


# ---------------------------------------------------------------- TensorBoard


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
def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
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
def test_tensorboard_has_a_graph_where_it_is_asked_for(tmp_path: Path) -> None:
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
