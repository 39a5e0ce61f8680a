"""DeviceStatsMonitor: what the accelerator says of a device, in the logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem import Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.callbacks import DeviceStatsMonitor
from stratagem.errors import ConfigurationError
from stratagem.loggers import CSVLogger


class Counting(CPUAccelerator):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def device_stats(self, device: torch.device) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked}


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, callback: DeviceStatsMonitor, **options: Any) -> list[dict[str, str]]:
    logger = CSVLogger(folder)
    trainer = Trainer(
        **{"accelerator": "cpu", "logger": logger, "max_epochs": 1, **options},
        callbacks=callback,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), [torch.ones(2, 2) for _ in range(12)])
    table = Path(logger.log_dir) / "metrics.csv"
    if not table.exists():
        return []
    rows = csv.DictReader(table.read_text().splitlines())
    return [row for row in rows if any("DeviceStats" in name and row[name] for name in row)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_come_before_and_after_each_batch_that_is_logged(
    accumulate: int, tmp_path: Path
) -> None:
    rows = fit(
        tmp_path,
        DeviceStatsMonitor(),
        accelerator=Counting(),
        log_every_n_steps=3,
        accumulate_grad_batches=accumulate,
    )
    assert [row["step"] for row in rows] == ["2", "5", "8", "11"][: 4 // accumulate]
    for row in rows:
        before = row["DeviceStatsMonitor.on_train_batch_start/asked"]
        assert float(before) < float(row["DeviceStatsMonitor.on_train_batch_end/asked"])


def test_device_stats_monitor_logs_batches_of_an_evaluation(tmp_path: Path) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        test_step = validation_step

    logger = CSVLogger(tmp_path)
    trainer = Trainer(
        accelerator=Counting(),
        logger=logger,
        log_every_n_steps=2,
        callbacks=DeviceStatsMonitor(),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    for run, what in ((trainer.validate, "validation"), (trainer.test, "test")):
        run(Validated(), [torch.ones(2, 2) for _ in range(5)])
        lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        for when in ("start", "end"):
            name = f"DeviceStatsMonitor.on_{what}_batch_{when}/asked"
            rows = csv.DictReader(lines)
            assert [row["step"] for row in rows if row.get(name)] == ["1", "3"]
    quiet = Trainer(
        accelerator="cpu", logger=False, callbacks=DeviceStatsMonitor(), enable_progress_bar=False
    )
    quiet.validate(Validated(), [torch.ones(2, 2)])


def test_device_stats_are_read_at_logged_steps_only(tmp_path: Path) -> None:
    accelerator = Counting()
    fit(tmp_path, DeviceStatsMonitor(), accelerator=accelerator, log_every_n_steps=6)
    assert accelerator.asked == 4


def test_device_stats_on_the_cpu_are_the_cpu_stats(
    tmp_path: Path,
) -> None:
    (row,) = fit(tmp_path, DeviceStatsMonitor(), log_every_n_steps=12)
    assert float(row["DeviceStatsMonitor.on_train_batch_end/resident_bytes"]) > 1e6
    assert fit(tmp_path, DeviceStatsMonitor(cpu_stats=False), log_every_n_steps=12) == []


def test_a_trainer_without_a_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="DeviceStatsMonitor has nowhere to log to: rec"):
        fit(tmp_path, DeviceStatsMonitor(), logger=False)
