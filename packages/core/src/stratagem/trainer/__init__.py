"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem.trainer.context import (
        FitContext as FitContext,
        FitState as FitState,
        RunContext as RunContext,
        RunState as RunState,
        StepContext as StepContext,
        StepPolicy as StepPolicy,
    )
    from stratagem.trainer.hooks import is_users as is_users
    from stratagem.trainer.job import Job as Job, Stage as Stage
    from stratagem.trainer.loaders.train_loader import TrainLoader as TrainLoader
    from stratagem.trainer.metrics.metrics import LatestMetrics as LatestMetrics, Metrics as Metrics
    from stratagem.trainer.options import TrainerOptions as TrainerOptions
    from stratagem.trainer.run import Run as Run
    from stratagem.trainer.step.batches import (
        BatchFeed as BatchFeed,
        training_batches as training_batches,
    )
    from stratagem.trainer.step.contract_check import (
        step_hooks_of as step_hooks_of,
        takes_own_steps as takes_own_steps,
    )
    from stratagem.trainer.step.optimizers import (
        SchedulerConfig as SchedulerConfig,
        needs_closure as needs_closure,
    )
    from stratagem.trainer.step.step import (
        EndOfEpoch as EndOfEpoch,
        Step as Step,
        make_step as make_step,
    )
    from stratagem.trainer.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
