"""TrainerAttributes: what a Trainer tells of its runs, where callbacks and users read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.callbacks import Callback, EarlyStopping, ModelCheckpoint, ProgressBar
from stratagem.trainer.options import OptionAttributes, check_limit

if TYPE_CHECKING:
    from stratagem.interfaces.accelerator import Accelerator
    from stratagem.interfaces.ranks import Ranks
    from stratagem.interfaces.strategy import Strategy
    from stratagem.loggers import Logger
    from stratagem.module.datamodule import DataModule
    from stratagem.module.module import Module
    from stratagem.plan.plan import RunPlan
    from stratagem.profilers import Profiler
    from stratagem.trainer.metrics.metrics import LatestValues
    from stratagem.trainer.progress import Progress, RunState
    from stratagem.trainer.run import Run
    from stratagem.trainer.step.optimizers import SchedulerConfig


class _LimitOf:
    """One of `Trainer.limits` as an attribute."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else trainer.limits[self._what]

    def __set__(self, trainer: Any, limit: int | float | None) -> None:
        checked = check_limit(f"limit_{self._what}_batches", limit)
        trainer.limits = {**trainer.limits, self._what: checked}


class TrainerAttributes(ABC, OptionAttributes):
    """Names of what a Trainer and its present run hold; it decides nothing."""

    callbacks: list[Callback]
    loggers: list[Logger]
    _state: RunState
    _progress: Progress
    _latest: LatestValues
    _run: Run | None
    _tuned: Run | None
    _trained_elsewhere: Module | None
    _profiler: Profiler | None

    @property
    @abstractmethod
    def plan(self) -> RunPlan:
        """What was chosen, and why."""

    @property
    @abstractmethod
    def strategy(self) -> Strategy:
        """The strategy."""

    @property
    @abstractmethod
    def run(self) -> Run:
        """The present run, or the one before."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The processes that train together; collectives work once they are launched."""

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_global_zero

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    # -- what runs

    @property
    def state(self) -> RunState:
        """What it is doing: which of its runs, and how the last one has ended."""
        return self._state

    @property
    def model(self) -> Module | None:
        """The model of the present run, or of the one before; None: there was none."""
        return None if self._run is None else self._run.module

    lightning_module = model

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the present run, or of the one before; None: there was none."""
        return None if self._with_data is None else self._with_data.datamodule

    @property
    def ckpt_path(self) -> str | None:
        """What the present run has loaded, or the one before; None: nothing.

        Before it is found: what was asked for, "best" and "last" too.
        """
        if self._run is None:
            return None
        run = self._run
        path = run.resumed_from or run.evaluated_from or run.job.ckpt_path
        return None if path is None else str(path)

    @property
    def training(self) -> bool:
        """Whether a fit is running, and no validation within it."""
        return self._state.stage == "fit" and not self._evaluates("validation")

    @property
    def validating(self) -> bool:
        """Whether validation is running, also within a fit."""
        return self._evaluates("validation")

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self._evaluates("test")

    @property
    def predicting(self) -> bool:
        """Whether predicting is running."""
        return self._evaluates("predict")

    def _evaluates(self, what: str) -> bool:
        return self._run is not None and self._run.evaluating == what

    @property
    def profiler(self) -> Profiler:
        """The profiler; one that does nothing where none was asked for."""
        if self._profiler is not None:
            return self._profiler
        from stratagem.profilers import PassThroughProfiler

        return PassThroughProfiler()

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended by an exception."""
        return self._state.status == "interrupted"

    # -- on what

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return self.strategy.accelerator

    @property
    def num_devices(self) -> int:
        """Devices of each node."""
        return len(self.plan.devices)

    @property
    def device_ids(self) -> list[int]:
        """Their indices."""
        return list(self.plan.devices)

    @property
    def num_nodes(self) -> int:
        """Machines taking part."""
        return self.plan.num_nodes

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self.strategy.precision.name

    # -- data

    @property
    def _with_data(self) -> Run | None:
        """The run whose loaders are shown: the present one, the one before, or a Tuner's."""
        return self._run if self._tuned is None else self._tuned

    @property
    def train_dataloader(self) -> Any:
        """This rank's loader for training; None: there is none."""
        run = self._with_data
        loader = None if run is None else run.train_loader
        return None if loader is None else loader.loader

    @property
    def val_dataloaders(self) -> Any:
        """This rank's loader for validation, or a list of several; None: there is none."""
        return self._loaders("validation")

    @property
    def test_dataloaders(self) -> Any:
        """This rank's loader for testing, or a list of several; None: there is none."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """This rank's loader for predicting, or a list of several; None: there is none."""
        return self._loaders("predict")

    def _loaders(self, what: str) -> Any:
        run = self._with_data
        found = [] if run is None else run.evaluation_loaders.get(what, [])
        loaders = [one.loader for one in found]
        return (loaders[0] if len(loaders) == 1 else loaders) if loaders else None

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each of this rank's loaders for validation; infinity if that is not known."""
        return self._numbers("validation")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Those of them that are run before training; none but in a fit."""
        if self._run is None or self._run.stage != "fit":
            return []
        limit = float("inf") if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        return [min(limit, number) for number in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each of this rank's loaders for testing; infinity if that is not known."""
        return self._numbers("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each of this rank's loaders for predicting; infinity if that is not known."""
        return self._numbers("predict")

    def _numbers(self, what: str) -> list[float]:
        run = self._with_data
        found = [] if run is None else run.evaluation_loaders.get(what, [])
        return [_count(number) for one in found for number in one.each]

    limit_train_batches = _LimitOf("train")
    """A number of batches (int), or a fraction of them; may be set between runs."""
    limit_val_batches = _LimitOf("val")
    """See `limit_train_batches`."""
    limit_test_batches = _LimitOf("test")
    """See `limit_train_batches`."""
    limit_predict_batches = _LimitOf("predict")
    """See `limit_train_batches`."""

    # -- steps

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches in an optimizer step of the present epoch."""
        return self.step_options.micro_batches_in(self.current_epoch)

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest norm or value of gradients, or None."""
        clip = self.step_options.clip
        return None if clip is None else clip.value

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """What is clipped: "norm" or "value"; None: nothing is."""
        clip = self.step_options.clip
        return None if clip is None else clip.algorithm

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit; infinity if nothing limits them.

        There once the data is, so in `configure_optimizers`, where schedulers are made for it. What
        ends training earlier (`max_time`, a callback) is not known.

        Raises:
            ConfigurationError: there is no fit.
        """
        loader = self.run.train_loader
        batches = 0 if loader is None else loader.batches
        limit = float("inf") if self.max_steps == -1 else self.max_steps
        if self.max_epochs == -1 or batches == float("inf"):
            return limit
        return min(limit, self.step_options.steps_in(self.max_epochs, int(batches)))

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
        run = self._with_data
        loader = None if run is None else run.train_loader
        return float("inf") if loader is None else _count(loader.batches)

    @property
    def is_within_step(self) -> bool:
        """Whether batches were read for an optimizer step that is yet to be taken.

        So it is in `on_train_batch_start`, and in `on_train_batch_end` of all but the last batch
        that is accumulated.
        """
        return self._run is not None and self._run.is_within_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the present training batch is the last one of its epoch, as far as is known."""
        step = None if self._run is None else self._run.step
        return step is not None and step.batch_idx + 1 >= self.num_training_batches

    @property
    def evaluating(self) -> bool:
        """Whether validation or a test is running."""
        return self.validating or self.testing

    @property
    def enable_validation(self) -> bool:
        """Whether a fit would validate."""
        return self.limits["val"] != 0 and (self._run is None or self._run.has_validation)

    @property
    def received_sigterm(self) -> bool:
        """Whether a signal is to end the present run."""
        return self._run is not None and self._run.interruption.signal is not None

    @property
    def sanity_checking(self) -> bool:
        """Whether these are the validation batches that are run before training."""
        return self._run is not None and self._run.validation.is_sanity_check

    # -- values, loggers, optimizers

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything that was logged since the last fit began.

        But for the single steps of evaluations, which nobody monitors.
        """
        return {name: torch.as_tensor(value) for name, value in self._latest.values.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything that goes to the loggers."""
        return self._latest.logged()

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
        """The folder of this run, on rank 0; the root folder if no logger has one."""
        own = self.loggers[0].log_dir if self.loggers and self.is_global_zero else ""
        return own or str(self.default_root_dir)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All of them."""
        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All of them."""
        return [c for c in self.callbacks if isinstance(c, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The ProgressBar, or None."""
        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers; none before the model is prepared.

        Raises:
            ConfigurationError: the run was in processes of its own.
        """
        if self._run is None and self._trained_elsewhere is None:
            return []
        prepared = self.run.prepared
        return [] if prepared is None else prepared.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning rate schedulers; none before the model is prepared.

        Raises:
            ConfigurationError: the run was in processes of its own.
        """
        if self._run is None and self._trained_elsewhere is None:
            return []
        return self.run.schedulers.configs


def _count(batches: float) -> float:
    """Return a number of batches as the int that it is; infinity stays."""
    return batches if batches == float("inf") else int(batches)
