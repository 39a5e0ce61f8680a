"""DeviceStatsMonitor: how full and how busy the device is, in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.accelerators import Accelerator
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Logs the accelerator's device statistics before and after logged batches.

    Statistics are logged every `log_every_n_steps` optimizer steps, as
    `DeviceStatsMonitor.on_train_batch_start/NAME` and `DeviceStatsMonitor.on_train_batch_end/NAME`.
    In validation and testing the interval counts batches, and names have `validation` or `test` in
    place of `train`. NAME is a name of `Accelerator.device_stats`, such as
    `allocated_bytes`; statistics of the CPU are named `cpu.NAME` unless the CPU is the device. The
    callback does not wait for the device: queued work may still be running. With several ranks, the
    device of rank 0 is logged.

    Args:
        cpu_stats: whether to log statistics of the CPU too; None: only if the CPU is the device.

    Raises:
        ConfigurationError: when a fit begins, the Trainer has no logger.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import DeviceStatsMonitor
        >>> trainer = Trainer(accelerator="cpu", callbacks=DeviceStatsMonitor())
        >>> any(isinstance(each, DeviceStatsMonitor) for each in trainer.callbacks)
        True
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._sources: list[tuple[str, Accelerator, Any]] = []

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Choose the devices whose figures are logged; refuse a Trainer without a logger."""
        self._sources = []
        if not trainer.loggers and stage != "fit":
            return
        if not trainer.loggers:
            raise ConfigurationError(
                "DeviceStatsMonitor has nowhere to log to: received a Trainer with logger=False; "
                "pass a logger, such as logger=CSVLogger('logs'), or leave the callback out"
            )
        strategy = trainer.strategy
        accelerator, device = strategy.accelerator, strategy.device
        is_host = accelerator.is_host
        if not is_host or self.cpu_stats is not False:
            self._sources.append(("", accelerator, device))
        if self.cpu_stats and not is_host:
            from stratagem.accelerators import CPUAccelerator

            cpu = CPUAccelerator()
            self._sources.append(("cpu.", cpu, cpu.device(0)))

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures before a batch."""
        # The step that is about to be taken is not counted yet.
        self._log(trainer, "on_train_batch_start", trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures after a batch."""
        self._log(trainer, "on_train_batch_end", trainer.run.state.logged_step)

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the figures before a batch."""
        self._log_evaluation(trainer, "on_validation_batch_start")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the figures after a batch."""
        self._log_evaluation(trainer, "on_validation_batch_end")

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the figures before a batch."""
        self._log_evaluation(trainer, "on_test_batch_start")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the figures after a batch."""
        self._log_evaluation(trainer, "on_test_batch_end")

    def _log(self, trainer: Trainer, when: str, step: int) -> None:
        trainer.run.metrics.row.update(self._figures(trainer, when, step))

    def _log_evaluation(self, trainer: Trainer, when: str) -> None:
        if not trainer.sanity_checking:
            progress, batch = trainer.run.state, trainer.run.evaluation.batches
            if figures := self._figures(trainer, when, batch):
                row = {**figures, "step": batch}
                trainer.run.rows.add(row, progress.logged_step, progress.epoch)

    def _figures(self, trainer: Trainer, when: str, step: int) -> dict[str, float]:
        """Return the figures by the names that they are logged as, where they are due."""
        every = trainer.options.log_every_n_steps
        if not trainer.is_global_zero or not every or (step + 1) % every:
            return {}
        return {
            f"{type(self).__name__}.{when}/{prefix}{name}": value
            for prefix, accelerator, device in self._sources
            for name, value in accelerator.device_stats(device).items()
        }
