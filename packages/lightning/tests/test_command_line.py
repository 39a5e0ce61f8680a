"""LightningCLI: a run that a command line and config files describe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from stratagem import Module
from stratagem.callbacks import LearningRateMonitor
from stratagem.profilers import SimpleProfiler

yaml = pytest.importorskip("yaml", reason="`nox -s loggers` runs this: PyYAML is not installed")
pytest.importorskip(
    "jsonargparse", reason="`nox -s loggers` runs this: jsonargparse is not installed"
)

from stratagem_lightning.api.cli import LightningCLI  # noqa: E402  # it imports jsonargparse
from stratagem_lightning.api.loggers import CSVLogger  # noqa: E402

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
]
DEFAULTS = {"callbacks": {"class_path": "DeviceStatsMonitor"}}


class Line(Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(4, 1), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.hparams.rate)


def test_classes_may_stand_by_their_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    words = [
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks.logging_interval=epoch",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.name=named",
        *("--trainer.profiler", "SimpleProfiler"),
        *("--model.rate", "0.5"),
    ]
    trainer = LightningCLI(model_class=Line, run=False, args=[*QUIET, *words]).trainer
    found = [c for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]
    assert [callback.logging_interval for callback in found] == ["epoch"]
    assert isinstance(trainer.profiler, SimpleProfiler)
    logger = trainer.logger
    assert isinstance(logger, CSVLogger)
    assert logger.name == "named"

    Path("run.yaml").write_text(
        """
        trainer:
          logger:
            class_path: CSVLogger
            init_args: {save_dir: ., name: of_a_file}
          callbacks:
            - class_path: LearningRateMonitor
              init_args: {logging_interval: step}
            - class_path: EarlyStopping
              init_args: {monitor: loss}
          profiler: SimpleProfiler
        model:
          rate: 0.25
        """
    )
    config = yaml.safe_load(Path("run.yaml").read_text())
    Path("trainer.yaml").write_text(yaml.safe_dump(config["trainer"]))
    for arguments in (["--config=run.yaml"], config, ["--trainer=trainer.yaml"]):
        trainer = LightningCLI(Line, run=False, args=arguments, trainer_defaults=DEFAULTS).trainer
        assert isinstance(trainer.logger, CSVLogger)
        assert trainer.logger.name == "of_a_file"
        names = [type(callback).__name__ for callback in trainer.callbacks]
        assert {"LearningRateMonitor", "EarlyStopping", "DeviceStatsMonitor"} <= {*names}
        assert isinstance(trainer.profiler, SimpleProfiler)

    monkeypatch.setattr(sys, "argv", ["train.py", "--model.rate=1"])
    with pytest.warns(UserWarning, match="place of the command line.*not read: --model.rate=1"):
        LightningCLI(Line, run=False, args=[])
