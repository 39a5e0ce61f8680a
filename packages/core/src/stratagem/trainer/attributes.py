"""TrainerAttributes: what a Trainer tells of its runs, where callbacks and users read it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.callbacks import Callback, ModelCheckpoint
from stratagem.lite.ranked import Ranked
from stratagem.trainer.options import OptionAttributes

if TYPE_CHECKING:
    from stratagem.loggers import Logger
    from stratagem.trainer.metrics import LatestValues
    from stratagem.trainer.optimizers import SchedulerConfig
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.run import Run


class TrainerAttributes(Ranked, OptionAttributes):
    """Names of what a Trainer and its present run hold; it decides nothing."""

    callbacks: list[Callback]
    loggers: list[Logger]
    _progress: Progress
    _latest: LatestValues
    _run: Run | None

    @property
    @abstractmethod
    def run(self) -> Run:
        """The present run, or the one before."""

    # -- how far training is

    @property
    def current_epoch(self) -> int:
        """The epoch, counted from 0."""
        return self._progress.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken."""
        return self._progress.global_step

    @property
    def batches_that_trained(self) -> int:
        """The number of batches of this epoch that were trained on."""
        return self._progress.batches

    @property
    def num_training_batches(self) -> float:
        """Batches of this rank in an epoch; infinity if that is not known."""
        loader = self.run.train_loader
        return 0 if loader is None else loader.batches

    @property
    def is_within_step(self) -> bool:
        """Whether batches were read for an optimizer step that is yet to be taken.

        So it is in `on_train_batch_start`, and in `on_train_batch_end` of all but the last batch
        that is accumulated.
        """
        return self._run is not None and self._run.is_within_step

    @property
    def sanity_checking(self) -> bool:
        """Whether these are the validation batches that are run before training."""
        return self._run is not None and self._run.validation.is_sanity_check

    # -- values, loggers, optimizers

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything that was logged since the last fit began."""
        return {name: torch.as_tensor(value) for name, value in self._latest.values.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest epoch values."""
        return self._latest.of_epochs

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The values for the progress bar."""
        return self.run.latest.bar

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        """The folder of this run, on rank 0; the root folder if there is no logger."""
        if self.loggers and self.is_global_zero:
            return self.loggers[0].log_dir
        return str(self.default_root_dir)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, once the model is prepared."""
        return self.run.require_prepared().optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning rate schedulers, once the model is prepared."""
        return self.run.schedulers.configs
