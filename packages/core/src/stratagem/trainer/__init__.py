"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem._lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.trainer.attributes import TrainerAttributes as TrainerAttributes
    from stratagem.trainer.hooks import is_users as is_users
    from stratagem.trainer.job import Job as Job
    from stratagem.trainer.loaders.loaders import source_of as source_of
    from stratagem.trainer.loaders.open import (
        open_evaluation_data as open_evaluation_data,
        open_fit_data as open_fit_data,
    )
    from stratagem.trainer.loaders.train_loader import TrainLoader as TrainLoader
    from stratagem.trainer.metrics.metrics import LatestValues as LatestValues, Metrics as Metrics
    from stratagem.trainer.options import check_whole as check_whole, root_folder as root_folder
    from stratagem.trainer.progress import Progress as Progress, RunState as RunState
    from stratagem.trainer.run import Run as Run
    from stratagem.trainer.step.batch_feed import (
        BatchFeed as BatchFeed,
        training_batches as training_batches,
    )
    from stratagem.trainer.step.contract_check import takes_own_steps as takes_own_steps
    from stratagem.trainer.step.hooked_step import (
        needs_closure as needs_closure,
        step_hooks_of as step_hooks_of,
    )
    from stratagem.trainer.step.optimizers import SchedulerConfig as SchedulerConfig
    from stratagem.trainer.step.step import EndOfEpoch as EndOfEpoch, Step as Step
    from stratagem.trainer.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "BatchFeed": "stratagem.trainer.step.batch_feed",
            "EndOfEpoch": "stratagem.trainer.step.step",
            "Job": "stratagem.trainer.job",
            "LatestValues": "stratagem.trainer.metrics.metrics",
            "Metrics": "stratagem.trainer.metrics.metrics",
            "Progress": "stratagem.trainer.progress",
            "Run": "stratagem.trainer.run",
            "RunState": "stratagem.trainer.progress",
            "SchedulerConfig": "stratagem.trainer.step.optimizers",
            "Step": "stratagem.trainer.step.step",
            "TrainLoader": "stratagem.trainer.loaders.train_loader",
            "Trainer": "stratagem.trainer.trainer",
            "TrainerAttributes": "stratagem.trainer.attributes",
            "check_whole": "stratagem.trainer.options",
            "is_users": "stratagem.trainer.hooks",
            "needs_closure": "stratagem.trainer.step.hooked_step",
            "open_evaluation_data": "stratagem.trainer.loaders.open",
            "open_fit_data": "stratagem.trainer.loaders.open",
            "root_folder": "stratagem.trainer.options",
            "source_of": "stratagem.trainer.loaders.loaders",
            "step_hooks_of": "stratagem.trainer.step.hooked_step",
            "takes_own_steps": "stratagem.trainer.step.contract_check",
            "training_batches": "stratagem.trainer.step.batch_feed",
        },
    )
