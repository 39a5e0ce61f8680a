"""TrainerAttributes: the read-only attributes of a Trainer."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

from stratagem.callbacks import Callback, ModelCheckpoint, ProgressBar
from stratagem.discovery.absent import check_assignment, find_or_explain
from stratagem.errors import ConfigurationError
from stratagem.interfaces.strategy import Strategy
from stratagem.module.datamodule import DataModule
from stratagem.module.module import Module
from stratagem.plan.plan import RunPlan
from stratagem.runtime.checkpoint_writer import CheckpointWriter
from stratagem.runtime.runtime import FrontEnd, Runtime
from stratagem.storage.paths import Location
from stratagem.trainer.context import FitState, RunState
from stratagem.trainer.metrics.metrics import LatestMetrics
from stratagem.trainer.options import Limit, TrainerOptions

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.callbacks import EarlyStopping
    from stratagem.loggers import Logger
    from stratagem.plan.step_options import Compilation
    from stratagem.profilers import Profiler
    from stratagem.trainer.run import Run
    from stratagem.trainer.step.optimizers import SchedulerConfig

T = TypeVar("T")

_ARGUMENTS = (
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "num_devices"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("sync_batchnorm", "compile", "async_save", "enable_checkpointing", "enable_progress_bar"),
    *("enable_model_summary", "profiler", "activation_checkpointing"),
)
"""Arguments that only a new Trainer changes."""
_OPTION = (
    "Pass {0}= to the Trainer, or set trainer.options = dataclasses.replace(trainer.options, "
    "{0}=...)"
)
_SETTERS = {
    **{name: f"Pass {name}= to the Trainer" for name in _ARGUMENTS},
    **{name: _OPTION.format(name) for name in TrainerOptions.__dataclass_fields__},
}
"""How to change an attribute that cannot be set."""


class Option(property, Generic[T]):
    """A field of `Trainer.options`, as a read-only attribute of the Trainer."""

    def __init__(self) -> None:
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = f"The value in force of the argument `{name}`."

    @overload  # type: ignore[override]
    def __get__(self, trainer: None, owner: type) -> Option[T]: ...
    @overload
    def __get__(self, trainer: TrainerAttributes, owner: type) -> T: ...
    def __get__(self, trainer: TrainerAttributes | None, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.options, self.name)


class TrainerAttributes(FrontEnd):
    """The read-only attributes of a Trainer: its arguments, and its current or last run.

    Each argument of the Trainer is an attribute. Its value is the one in force: `max_epochs` is
    1000 if no limit was passed, and `max_time` is in seconds.

    Attributes:
        options: the options of runs.
        callbacks: the user's callbacks and the added ones.
        loggers: all loggers.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=3)
        >>> trainer.max_epochs, trainer.precision, trainer.device_ids
        (3, '32-true', [0])
    """

    options: TrainerOptions
    callbacks: list[Callback]
    loggers: list[Logger]
    _state: RunState
    _fit_state: FitState
    _latest: LatestMetrics
    _profiler: Profiler | None
    _run: Run | None
    """The current or last run in this process."""
    _opened: Run | None
    """The run of `open_data`, until the next run; it has data, and was not executed."""
    _remote_model: Module | None
    """The model of the last run, if the run used other processes."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a name that would change nothing is refused."""
        if not name.startswith("_"):
            check_assignment(self, name, _SETTERS)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return find_or_explain(self, name)

    # -- the arguments

    max_epochs = Option[int]()
    min_epochs = Option[int]()
    max_steps = Option[int]()
    min_steps = Option[int]()
    max_time = Option[float | None]()
    fast_dev_run = Option[int]()
    limit_train_batches = Option[Limit]()
    limit_val_batches = Option[Limit]()
    limit_test_batches = Option[Limit]()
    limit_predict_batches = Option[Limit]()
    val_check_interval = Option[Limit | timedelta]()
    check_val_every_n_epoch = Option[int | None]()
    num_sanity_val_steps = Option[int]()
    log_every_n_steps = Option[int]()
    deterministic = Option[bool | str]()
    benchmark = Option[bool]()
    inference_mode = Option[bool]()
    use_distributed_sampler = Option[bool]()
    detect_anomaly = Option[bool]()
    detect_divergence = Option[int]()
    enable_autolog_hparams = Option[bool]()
    overfit_batches = Option[Limit]()
    reload_dataloaders_every_n_epochs = Option[int]()
    default_root_dir = Option[Location]()
    weights = Option[Any]()

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches in an optimizer step of the current epoch."""
        return self.options.step_options.micro_batches_in(self.current_epoch)

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest norm or value of gradients, or None."""
        clip = self.options.step_options.clip
        return None if clip is None else clip.value

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """The kind of clipping, "norm" or "value"; None: no clipping."""
        clip = self.options.step_options.clip
        return None if clip is None else clip.algorithm

    @property
    def sync_batchnorm(self) -> bool:
        """Whether batch norm layers compute their statistics over all ranks."""
        return self.options.step_options.sync_batchnorm

    @property
    def activation_checkpointing(self) -> Any:
        """The modules that compute activations again in backward, as they were given; or None."""
        return self.options.step_options.activation_checkpointing

    @property
    def compile(self) -> Compilation | None:
        """The options of `torch.compile`, or None."""
        return self.options.step_options.compilation

    @property
    def devices(self) -> list[int]:
        """The indices of this node's devices; `num_devices` is their number."""
        return self.device_ids

    @property
    def plugins(self) -> list[Any]:
        """The CheckpointIO, the ClusterEnvironment and the Precision of the strategy."""
        strategy = self.strategy
        return [strategy.checkpoint_io, strategy.cluster_environment, strategy.precision]

    @property
    def async_save(self) -> bool:
        """Whether checkpoints are written in the background."""
        return self.plan.request.async_save

    @property
    def enable_checkpointing(self) -> bool:
        """Whether a ModelCheckpoint saves checkpoints."""
        return self.checkpoint_callback is not None

    @property
    def enable_progress_bar(self) -> bool:
        """Whether a ProgressBar shows progress."""
        return self.progress_bar_callback is not None

    @property
    def enable_model_summary(self) -> bool:
        """Whether a ModelSummary prints the layers."""
        kinds = (kind.__name__ for callback in self.callbacks for kind in type(callback).__mro__)
        return "ModelSummary" in kinds

    # -- the plan and its components

    @property
    def plan(self) -> RunPlan:
        """The resolved components and their reasons; `trainer.plan.explain()` returns a text."""
        return self.runtime.plan

    @property
    def runtime(self) -> Runtime:
        """The runtime, which holds the plan, the strategy and the ranks, and launches processes."""
        return self._runtime

    @property
    def strategy(self) -> Strategy:
        """The strategy; its device is known after processes are launched."""
        return self.runtime.strategy

    @property
    def checkpoint_writer(self) -> CheckpointWriter:
        """The writer, which saves and loads checkpoints on all ranks together."""
        return self.runtime.checkpoint_writer

    # -- the current run, or the last one

    @property
    def run(self) -> Run:
        """The current or last run, for callbacks that need more than the Trainer's attributes.

        Raises:
            ConfigurationError: if this Trainer has not run in this process.
        """
        if self._run is not None:
            return self._run
        if self._remote_model is not None:
            raise ConfigurationError(
                f"the run was in processes of its own (launcher {self.plan.launcher.name!r}), of "
                "which only the model's weights, logged values and callbacks' states come back: "
                "read this in a callback or in the Module, or train with strategy='ddp' in a script"
            )
        raise ConfigurationError(
            "this needs a model that was fitted, validated, tested or predicted with this "
            "Trainer; there was none yet"
        )

    @property
    def latest_run(self) -> Run | None:
        """The current or last run in this process; None before the first run."""
        return self._run

    @property
    def state(self) -> RunState:
        """The stage of the current run, and the status of the last run."""
        return self._state

    @property
    def fit_state(self) -> FitState:
        """The state of the training loop in the current or last fit."""
        return self._fit_state

    @property
    def latest_metrics(self) -> LatestMetrics:
        """The latest logged values since the start of the current or last fit."""
        return self._latest

    @property
    def model(self) -> Module | None:
        """The model of the current or last run; None before the first run."""
        return self._remote_model if self._run is None else self._run.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last run, if any."""
        run = self._run_with_data
        return None if run is None else run.datamodule

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the current or last run has loaded, if any."""
        path = None if self._run is None else self._run.resume_point.path
        return None if path is None else str(path)

    @property
    def profiler(self) -> Profiler:
        """The profiler; a PassThroughProfiler without the argument `profiler`."""
        if self._profiler is not None:
            return self._profiler
        from stratagem.profilers import PassThroughProfiler

        return PassThroughProfiler()

    @profiler.setter
    def profiler(self, profiler: Profiler | None) -> None:
        self._profiler = profiler

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._fit_state.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken so far."""
        return self._fit_state.global_step

    @property
    def is_within_step(self) -> bool:
        """Whether an optimizer step has begun, but is not yet complete.

        This is True in `on_train_batch_start`. In `on_train_batch_end` it is True for all
        accumulated batches except the last.
        """
        return self._run is not None and self._run.is_within_step

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check, which validates before training, is running."""
        return self._run is not None and self._run.validation.is_sanity_check

    @property
    def training(self) -> bool:
        """Whether a fit is running, outside of its validations."""
        return self._state.stage == "fit" and not self._evaluates("validation")

    @property
    def validating(self) -> bool:
        """Whether validation is running, also within a fit; False in the sanity check."""
        is_validating = self._state.stage == "validate" or self._evaluates("validation")
        return is_validating and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether `test` is running."""
        return self._state.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` is running."""
        return self._state.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether validation or testing is running."""
        return self.validating or self.testing

    def _evaluates(self, what: str) -> bool:
        return self._run is not None and self._run.evaluation.what == what

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended with an exception."""
        return self._state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether a signal ends the current fit on all ranks."""
        return self._run is not None and self._run.interruption.signal is not None

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch.

        False if the loader's length is unknown.
        """
        run = self._run
        if run is None or run.fit_data is None:
            return False
        batch_idx = self._fit_state.batches - 1 if run.step is None else run.step.last_batch_idx
        return batch_idx + 1 >= run.fit_data.loader.end

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps of the whole fit; infinity without a limit.

        The number is available after the loaders are created, so `configure_optimizers` can pass it
        to schedulers. The fit may end earlier, by `max_time` or a callback.

        Raises:
            ConfigurationError: outside of a fit.
        """
        options, data = self.options, self.run.fit_data
        batches = 0 if data is None else data.loader.batches
        limit = float("inf") if options.max_steps == -1 else options.max_steps
        if options.max_epochs == -1 or batches == float("inf"):
            return limit
        return min(limit, options.step_options.steps_in(options.max_epochs, int(batches)))

    # -- data

    @property
    def _run_with_data(self) -> Run | None:
        return self._run if self._opened is None else self._opened

    @property
    def train_dataloader(self) -> Any:
        """The training loader of this rank, or None."""
        run = self._run_with_data
        return None if run is None or run.fit_data is None else run.fit_data.loader.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader of this rank, a list of several, or None."""
        return self.loaders_of("validation")

    def loaders_of(self, what: str) -> Any:
        """The loader of this rank for "validation", "test" or "predict", a list, or None."""
        run = self._run_with_data
        found = [] if run is None else run.evaluation_loaders.get(what, [])
        loaders = [one.loader for one in found]
        return (loaders[0] if len(loaders) == 1 else loaders) if loaders else None

    @property
    def test_dataloaders(self) -> Any:
        """The test loader of this rank, a list of several, or None."""
        return self.loaders_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader of this rank for predicting, a list of several, or None."""
        return self.loaders_of("predict")

    @property
    def enable_validation(self) -> bool:
        """Whether a fit would validate."""
        run = self._run
        return self.limit_val_batches != 0 and (run is None or bool(run.validation.loaders))

    @property
    def num_training_batches(self) -> float:
        """The number of training batches of this rank in an epoch; infinity if it is unknown."""
        run = self._run_with_data
        data = None if run is None else run.fit_data
        batches = float("inf") if data is None else data.loader.batches
        return batches if batches == float("inf") else int(batches)

    @property
    def num_val_batches(self) -> list[float]:
        """The number of batches of each validation loader; infinity if it is unknown."""
        return self.batches_of("validation")

    @property
    def num_test_batches(self) -> list[float]:
        """The number of batches of each test loader; infinity if it is unknown."""
        return self.batches_of("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """The number of batches of each loader for predicting; infinity if it is unknown."""
        return self.batches_of("predict")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """The number of batches of each loader in a fit's sanity check; [] without a fit."""
        if self._run is None or self._run.stage != "fit":
            return []
        steps = self.num_sanity_val_steps
        limit = float("inf") if steps == -1 else steps
        return [min(limit, number) for number in self.num_val_batches]

    def batches_of(self, what: str) -> list[float]:
        """The number of batches of each loader for "validation", "test" or "predict"."""
        run = self._run_with_data
        found = [] if run is None else run.evaluation_loaders.get(what, [])
        return [n if n == float("inf") else int(n) for one in found for n in one.each]

    # -- values, loggers, optimizers

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest logged value of each name since the start of the last fit.

        Values of single evaluation steps are left out, since no callback monitors them.
        """
        return {name: torch.as_tensor(value) for name, value in self._latest.values.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest value of each name that goes to the loggers."""
        return self._latest.logged()

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The values for the progress bar."""
        return self._latest.bar

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        """The first logger's folder on rank 0; `options.default_root_dir` otherwise."""
        own = self.loggers[0].log_dir if self.loggers and self.is_global_zero else ""
        return own or str(self.options.default_root_dir)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All callbacks of type ModelCheckpoint."""
        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All callbacks of type EarlyStopping."""
        from stratagem.callbacks.early_stopping import EarlyStopping  # a run imports what it needs

        return [c for c in self.callbacks if isinstance(c, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The first ProgressBar, or None."""
        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers; an empty list before the model is prepared.

        Raises:
            ConfigurationError: if the run used other processes.
        """
        prepared = None if self.model is None else self.run.prepared
        return [] if prepared is None else prepared.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning rate schedulers; an empty list before the model is prepared.

        Raises:
            ConfigurationError: if the run used other processes.
        """
        return [] if self.model is None else self.run.schedulers.configs
