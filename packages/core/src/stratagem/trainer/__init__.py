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
            "stratagem.trainer.attributes": "TrainerAttributes",
            "stratagem.trainer.hooks": "is_users",
            "stratagem.trainer.job": "Job",
            "stratagem.trainer.loaders.loaders": "source_of",
            "stratagem.trainer.loaders.open": "open_evaluation_data open_fit_data",
            "stratagem.trainer.loaders.train_loader": "TrainLoader",
            "stratagem.trainer.metrics.metrics": "LatestValues Metrics",
            "stratagem.trainer.options": "check_whole root_folder",
            "stratagem.trainer.progress": "Progress RunState",
            "stratagem.trainer.run": "Run",
            "stratagem.trainer.step.contract_check": "takes_own_steps",
            "stratagem.trainer.step.hooked_step": "needs_closure step_hooks_of",
            "stratagem.trainer.step.optimizers": "SchedulerConfig",
            "stratagem.trainer.step.step": "EndOfEpoch Step",
            "stratagem.trainer.trainer": "Trainer",
        },
    )
