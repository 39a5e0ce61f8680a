"""The extras pass the conformance kits; loggers write without a network.

`nox -s loggers` has the libraries of the loggers; CI does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stratagem.loggers import Logger
from stratagem_extras.callbacks.timer import Timer
from stratagem_extras.loggers.mlflow_logger import MLFlowLogger
from stratagem_extras.loggers.neptune_logger import NeptuneLogger
from stratagem_extras.loggers.tensorboard_logger import TensorBoardLogger
from stratagem_testing import CallbackConformance, LoggerConformance, ProfilerConformance

pytestmark = pytest.mark.conformance

SESSION = "its SDK is not installed here; `nox -s loggers` runs this"
RUN = "0123456789abcdef"


def needs(package: str) -> pytest.MarkDecorator:
    """Leave a class out where its library is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=SESSION)


def tensorboard_logger() -> Logger:
    return TensorBoardLogger("logs", version=0)


def mlflow_logger() -> Logger:
    """Return a logger of the one run that the folder holds."""
    if not Path("logs/mlflow.db").exists():
        return MLFlowLogger(save_dir="logs")
    from mlflow.tracking import MlflowClient

    client = MlflowClient("sqlite:///logs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'stratagem_logs'")
    (run,) = client.search_runs([experiment.experiment_id])
    return MLFlowLogger(save_dir="logs", run_id=run.info.run_id)


def neptune_logger() -> Logger:
    return NeptuneLogger(project="us/tests", mode="offline", custom_run_id=RUN)


# ---------------------------------------------------------------- what they have written

Rows = list[tuple[int | None, dict[str, float]]]


def by_step(values: Iterable[tuple[int, str, float]]) -> Rows:
    """Return values in the rows of their steps."""
    rows: dict[int | None, dict[str, float]] = {}
    for step, name, value in values:
        rows.setdefault(step, {})[name] = value
    return list(rows.items())


def of_tensorboard(logger: Logger) -> Rows:
    """Return what TensorBoard would show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        shown = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
        shown.Reload()
    events = [
        (event.wall_time, event.step, tag, float(f"{event.value:.7g}"))  # it keeps float32
        for tag in shown.Tags()["scalars"]
        for event in shown.Scalars(tag)
    ]
    return by_step(event[1:] for event in sorted(events))


def of_mlflow(logger: MLFlowLogger) -> Rows:
    """Return what MLflow's database has."""
    assert logger.run_id == logger.version  # what the client's methods take, not the fit's id
    client, run = logger.experiment, logger.version
    found = [
        (value.timestamp, value.step, name, value.value)
        for name in client.get_run(run).data.metrics
        for value in client.get_metric_history(run, name)
    ]
    largest = sys.float_info.max  # which SQLite holds for an infinity
    return by_step(
        (step, name, float("inf") if value == largest else value)
        for _, step, name, value in sorted(found, key=lambda each: each[:2])
    )


def of_neptune(logger: NeptuneLogger) -> Rows:
    """Return what `neptune sync` would send."""
    found = []
    for file in sorted(Path(".neptune").rglob("data-*.log"), key=lambda path: path.stat().st_mtime):
        text = file.read_text()
        decoder, at = json.JSONDecoder(), 0
        while (at := len(text) - len(text[at:].lstrip("\0\n "))) < len(text):
            entry, at = decoder.raw_decode(text, at)
            operation = entry["obj"]
            if operation["type"] == "LogFloats" and operation["path"][0] == logger.prefix:
                name = "/".join(operation["path"][1:])
                found += [(value["step"], name, value["value"]) for value in operation["values"]]
    return by_step(found)


# ---------------------------------------------------------------- the kit


@needs("tensorboard")
class TestTensorBoardLogger(LoggerConformance):
    logger = tensorboard_logger
    read = of_tensorboard


@needs("mlflow")
class TestMLFlowLogger(LoggerConformance):
    logger = mlflow_logger
    read = of_mlflow
    library_stays = True  # connections to its database

    def test_rows_of_a_run_go_through_log_metrics_of_a_subclass(self, tmp_path: Path) -> None:
        class WithoutEpochs(MLFlowLogger):
            def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
                super().log_metrics({"loss": metrics["loss"]}, step)

        logger = WithoutEpochs(save_dir=tmp_path)
        logger.log_rows([(step, {"loss": 0.5, "epoch": 0.0}) for step in range(3)])
        logger.finalize("success")
        assert of_mlflow(logger) == [(step, {"loss": 0.5}) for step in range(3)]


@needs("neptune")
class TestNeptuneLogger(LoggerConformance):
    logger = neptune_logger
    read = of_neptune
    library_stays = True  # the threads of the run, which users may go on to write to

    @classmethod
    def checks(cls) -> list[str]:
        """Neptune's client passes over NaN and infinity, and says so."""
        return [name for name in super().checks() if name != "rows/not finite"]


# ---------------------------------------------------------------- in the background

OFFLINE = """
import torch
from stratagem import Module, Trainer
from stratagem.loggers import {kind}

class Line(Module):
    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)

loader = torch.utils.data.DataLoader(torch.ones(4, 1), 2)
trainer = Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, logger={logger})
trainer.fit(Line(), loader)
print("steps", trainer.global_step)
"""


@pytest.mark.parametrize(
    ("package", "kind", "logger", "file"),
    [
        (
            "wandb",
            "WandbLogger",
            "WandbLogger(save_dir='.', offline=True)",
            "wandb/offline-run-*/*.wandb",
        ),
        ("comet_ml", "CometLogger", "CometLogger(save_dir='.', online=False)", "*.zip"),
    ],
)
def test_offline_run_of_a_service_logger_writes_a_local_file(
    package: str, kind: str, logger: str, file: str, tmp_path: Path
) -> None:
    pytest.importorskip(package, reason=SESSION)
    finished = subprocess.run(
        [sys.executable, "-c", OFFLINE.format(kind=kind, logger=logger)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "steps 2" in finished.stdout
    (written,) = tmp_path.glob(file)
    assert written.stat().st_size > 0


# ---------------------------------------------------------------- callbacks


class TestLearningRateMonitor(CallbackConformance):
    callback = "lr_monitor"


class TestDeviceStatsMonitor(CallbackConformance):
    callback = "device_stats"


class TestEMAWeightAveraging(CallbackConformance):
    callback = "ema"
    changes_training = True


def timer() -> Timer:
    return Timer(duration="00:01:00:00")


class TestTimer(CallbackConformance):
    callback = timer


# ---------------------------------------------------------------- profilers


class TestSimpleProfiler(ProfilerConformance):
    profiler = "simple"


class TestAdvancedProfiler(ProfilerConformance):
    profiler = "advanced"


class TestPyTorchProfiler(ProfilerConformance):
    profiler = "pytorch"
