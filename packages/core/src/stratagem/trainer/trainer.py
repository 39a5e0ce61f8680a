"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.callbacks import Callback, ModelCheckpoint, ProgressBar
from stratagem.datamodule import DataModule
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.strategy import Prepared, Strategy
from stratagem.interfaces.train_step import GradientClip
from stratagem.lite import Lite
from stratagem.lite_wrappers import wrap_optimizer
from stratagem.loggers import CSVLogger, Logger
from stratagem.module import Module
from stratagem.resolve import RunPlan
from stratagem.step_module import StepModule
from stratagem.trainer import checkpoints, evaluation, fit_loop, loaders
from stratagem.trainer.events import Events
from stratagem.trainer.loaders import LimitedLoader, check_limit
from stratagem.trainer.logged_values import LoggedValues
from stratagem.trainer.optimization import SchedulerConfig, configure
from stratagem.trainer.progress import Progress

Devices = int | str | list[int] | tuple[int, ...] | None


@dataclass(slots=True)
class RunState:
    """What the Trainer is doing.

    Attributes:
        stage: "fit", "validate", "test", "predict", or "" between runs.
        status: "running", "finished" or "interrupted".
    """

    stage: str = ""
    status: str = "finished"


class Trainer:
    """Trains, validates, tests and predicts.

    Args:
        accelerator: a name, an Accelerator, or "auto".
        strategy: a name, a Strategy, or "auto".
        devices: how many, which, -1 for all, or "auto".
        num_nodes: machines taking part.
        precision: a name ("32-true", "bf16-mixed", ...), 64, 32, 16, "bf16", or a Precision.
        plugins: CheckpointIO, ClusterEnvironment or Precision objects, or names of them.
        logger: a Logger, several, False for none, or True for a CSVLogger.
        callbacks: a Callback or several.
        max_epochs: epochs to train; -1: no limit; None: 1000, unless max_steps or max_time is set.
        min_epochs, min_steps: train at least so long before `should_stop` counts.
        max_steps: optimizer steps to train; -1: no limit.
        max_time: time to train: a timedelta, "DD:HH:MM:SS", or seconds.
        fast_dev_run: run so many batches (True: one) of everything, without logger and checkpoints.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number
            of batches (int) or a fraction of them (float).
        val_check_interval: validate after so many batches (int) or such a fraction of the epoch.
        check_val_every_n_epoch: validate in every n-th epoch.
        num_sanity_val_steps: validation batches to run before training; -1: all.
        log_every_n_steps: hand every n-th step's values to the loggers.
        accumulate_grad_batches: batches in an optimizer step, or by first epoch ({0: 8, 4: 4}).
        gradient_clip_val: largest norm or value of gradients; None: no clipping.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: use deterministic algorithms; "warn" only warns where there is none.
        benchmark: let cuDNN choose by trying.
        inference_mode: evaluate under inference_mode, not no_grad.
        use_distributed_sampler: divide data between ranks.
        detect_anomaly: check each loss and backward for NaN; slow.
        enable_checkpointing: add a ModelCheckpoint if there is none.
        enable_progress_bar: add a ProgressBar if there is none.
        default_root_dir: where logs and checkpoints go; None: the current folder.
        gpus, tpu_cores: shorthands, see `Lite`.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.plan.strategy.name
        'single_device'
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Any = "32-true",
        plugins: Any = None,
        logger: Logger | Sequence[Logger] | bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | float | timedelta | Mapping[str, int] | None = None,
        fast_dev_run: bool | int = False,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 1,
        accumulate_grad_batches: int | Mapping[int, int] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        deterministic: bool | str = False,
        benchmark: bool = False,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
        gpus: int | str | list[int] | None = None,
        tpu_cores: int | str | list[int] | None = None,
    ) -> None:
        self.lite = Lite(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            gpus=gpus,
            tpu_cores=tpu_cores,
        )
        self.default_root_dir = Path.cwd() if default_root_dir is None else Path(default_root_dir)

        # How long, and how much of the data.
        self.fast_dev_run = _check_fast_dev_run(fast_dev_run)
        if self.fast_dev_run:
            quick = int(self.fast_dev_run)
            limit_train_batches = limit_val_batches = quick
            limit_test_batches = limit_predict_batches = quick
            max_epochs, max_steps, val_check_interval, num_sanity_val_steps = 1, quick, 1.0, 0
            check_val_every_n_epoch = 1
        self.max_time = _seconds(max_time)
        if max_epochs is None:
            unlimited = max_steps != -1 or self.max_time is not None
            max_epochs = -1 if unlimited else 1000
        for name, value, least in (
            ("max_epochs", max_epochs, -1),
            ("max_steps", max_steps, -1),
            ("min_epochs", min_epochs or 0, 0),
            ("min_steps", min_steps or 0, 0),
            ("check_val_every_n_epoch", check_val_every_n_epoch, 1),
            ("num_sanity_val_steps", num_sanity_val_steps, -1),
            ("log_every_n_steps", log_every_n_steps, 0),
        ):
            _check_whole(name, value, least)
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.min_epochs = min_epochs or 0
        self.min_steps = min_steps or 0
        self.limit_train_batches = check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = check_limit("limit_predict_batches", limit_predict_batches)
        self.val_check_interval = check_limit("val_check_interval", val_check_interval)
        if self.val_check_interval == 0:
            raise ConfigurationError(
                "val_check_interval=0: expected at least one batch (int) or a fraction above 0"
            )
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = num_sanity_val_steps
        self.log_every_n_steps = log_every_n_steps
        self.use_distributed_sampler = use_distributed_sampler

        # A training step.
        self._accumulation = _check_accumulation(accumulate_grad_batches)
        self.gradient_clip = _gradient_clip(gradient_clip_val, gradient_clip_algorithm)
        self.detect_anomaly = detect_anomaly
        self.inference_mode = inference_mode
        self._deterministic = deterministic
        self._benchmark = benchmark
        _check_deterministic(deterministic)

        # Who is told.
        self.loggers = self._loggers(logger)
        self.callbacks = self._callbacks(callbacks, enable_checkpointing, enable_progress_bar)

        # Where a run stands.
        self.progress = Progress()
        self.state = RunState()
        self.should_stop = False
        """Set to True, on every rank alike, to end training after the present step."""
        self.sanity_checking = False
        self.callback_metrics: dict[str, Tensor] = {}
        """The latest value of everything that was logged."""
        self.logged_metrics: dict[str, Tensor] = {}
        """The latest value of everything that went to the loggers."""
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.datamodule: DataModule | None = None
        self.num_training_batches: float = 0
        """Batches of this rank in an epoch; infinity if that is not known."""
        self.val_dataloaders: list[LimitedLoader] = []
        self._began = 0.0

    def _loggers(self, logger: Any) -> list[Logger]:
        if self.fast_dev_run or logger is False:
            return []
        if logger is None or logger is True:
            return [CSVLogger(self.default_root_dir)]
        given = list(logger) if isinstance(logger, (list, tuple)) else [logger]
        for one in given:
            if not isinstance(one, Logger):
                raise ConfigurationError(
                    f"logger={one!r}: expected a stratagem.loggers.Logger, a list of them, True or "
                    "False"
                )
        return given

    def _callbacks(self, given: Any, checkpointing: bool, progress_bar: bool) -> list[Callback]:
        callbacks: list[Callback] = (
            [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        )
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigurationError(
                    f"callbacks has {callback!r}; expected instances of stratagem.Callback"
                )
        saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
        if saves and not checkpointing:
            raise ConfigurationError(
                "callbacks has a ModelCheckpoint, but enable_checkpointing=False: leave one of "
                "them out"
            )
        if self.fast_dev_run:
            callbacks = [c for c in callbacks if not isinstance(c, ModelCheckpoint)]
        elif checkpointing and not saves:
            callbacks.append(ModelCheckpoint())
        if progress_bar and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.insert(0, ProgressBar())
        _check_state_keys(callbacks)
        return callbacks

    # -- what runs where

    @property
    def plan(self) -> RunPlan:
        """What was chosen, and why; `trainer.plan.explain()` is its text."""
        return self.lite.plan

    @property
    def strategy(self) -> Strategy:
        """The strategy; its collectives work once processes are launched."""
        return self.lite.strategy

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.lite.world_size

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.lite.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.lite.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.lite.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.lite.is_global_zero

    @property
    def current_epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken."""
        return self.progress.global_step

    @property
    def batches_that_trained(self) -> int:
        """The number of batches of this epoch that were trained on."""
        return self.progress.batches

    @property
    def has_validation(self) -> bool:
        """Whether this fit validates."""
        return bool(self.val_dataloaders) and self.limit_val_batches != 0

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers_of_this_rank(self) -> list[Logger]:
        """The loggers on rank 0; none elsewhere."""
        return self.loggers if self.is_global_zero else []

    @property
    def log_dir(self) -> str:
        """The folder of this run, on rank 0; the root folder if there is no logger."""
        if self.loggers and self.is_global_zero:
            return self.loggers[0].log_dir
        return str(self.default_root_dir)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The values for the progress bar."""
        return self.train_values.bar

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, once the model is prepared."""
        return self.prepared.optimizers

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)

    # -- the four runs

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train a model.

        Args:
            model: what to train.
            train_dataloaders: a DataLoader or another iterable of batches, or a DataModule; None:
                the datamodule's or the model's.
            val_dataloaders: one or several.
            datamodule: in place of loaders.
            ckpt_path: checkpoint to resume from: a path, "last" or "best".

        Raises:
            UserCodeError: the model or a loader does not keep its contract.
            CheckpointError: the checkpoint cannot be used.
            RankFailedError: another rank failed.
        """
        _check_module(model, "fit")
        train_dataloaders, datamodule = _split_datamodule(train_dataloaders, datamodule)
        self._launch(
            self._fit, "fit", model, datamodule, train_dataloaders, val_dataloaders, ckpt_path
        )

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run validation; return the values, a dict for each loader.

        Args:
            model: None: the one that was fitted.
            dataloaders: one or several; None: the datamodule's or the model's.
            datamodule: in place of loaders.
            ckpt_path: weights to load before: a path, "last" or "best".
            verbose: print the values.
        """
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run testing; return the values, a dict for each loader. Arguments as in `validate`."""
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> Any:
        """Predict; return what `predict_step` returned, for this rank's part of the data.

        Args:
            model, dataloaders, datamodule, ckpt_path: as in `validate`.
            return_predictions: False drops them; callbacks see each.

        Returns:
            A list of batches, or a list of those for several loaders; None if they are dropped.
        """
        model = self._model_or_last(model)
        _check_module(model, "predict")
        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        predictions = self._launch(
            self._predict, "predict", model, datamodule, dataloaders, ckpt_path
        )
        if not return_predictions:
            return None
        return predictions[0] if len(predictions) == 1 else predictions

    def _evaluate(
        self,
        stage: str,
        model: Module | None,
        dataloaders: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> list[dict[str, float]]:
        model = self._model_or_last(model)
        _check_module(model, stage)
        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        values, count = self._launch(
            self._evaluate_on_rank, stage, model, datamodule, dataloaders, ckpt_path
        )
        if verbose and self.is_global_zero:
            _print_values(stage, values)
        return _by_loader(values, count)

    def _model_or_last(self, model: Module | None) -> Module:
        if model is not None:
            return model
        if not hasattr(self, "module"):
            raise ConfigurationError(
                "there is no model: pass one, or fit one with this Trainer before"
            )
        return self.module

    # -- one run, on every rank

    def _launch(self, run: Any, stage: str, model: Module, *args: Any) -> Any:
        self.state = RunState(stage, "running")
        try:
            result = self.lite.launch(_call, self._run, run, stage, model, *args)
        except BaseException:
            self.state.status = "interrupted"
            raise
        self.state = RunState("", "finished")
        return result

    def _run(
        self, run: Any, stage: str, model: Module, datamodule: DataModule | None, *args: Any
    ) -> Any:
        """Set up what all four runs share, run, and take it down."""
        self._attach(model, datamodule)
        self.events = Events(self, model, self.callbacks)
        self.train_values = LoggedValues(
            self.strategy,
            self.loggers_of_this_rank if stage == "fit" else (),
            in_training=True,
            every_n_steps=self.log_every_n_steps,
        )
        restore_modes = _set_determinism(self._deterministic, self._benchmark)
        status = "failed"
        try:
            if datamodule is not None:
                if self.local_rank == 0:
                    datamodule.prepare_data()
                self.strategy.barrier("prepare_data")
                datamodule.setup(stage)
            self.strategy.setup(self)
            with self.lite.init_module():
                model.configure_model()
            self.events.tell("setup", stage)
            with fit_loop.anomaly_detection(self.detect_anomaly):
                result = run(model, *args)
            self.events.tell("teardown", stage)
            if datamodule is not None:
                datamodule.teardown(stage)
            status = "success"
            return result
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_exception(self, model, error)
            raise
        finally:
            # What was logged before an error is what explains it.
            self.train_values.flush()
            for logger in self.loggers_of_this_rank:
                logger.finalize(status)
            model.__dict__["_logged"] = None
            restore_modes()

    def _attach(self, model: Module, datamodule: DataModule | None) -> None:
        self.module = model
        self.datamodule = datamodule
        model.__dict__["_trainer"] = self
        if datamodule is not None:
            datamodule.trainer = self
        wanted = model.configure_callbacks()
        wanted = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        kinds = tuple(type(callback) for callback in wanted)
        self.callbacks = [c for c in self.callbacks if type(c) not in kinds] + wanted

    def _fit(
        self, model: Module, train: Any, val: Any, ckpt_path: str | Path | None
    ) -> None:
        self.should_stop = False
        self._began = monotonic()
        checkpoint = None if ckpt_path is None else self._read(ckpt_path)
        train_loader = self._train_loader(model, train)
        self.num_training_batches = train_loader.batches
        self.val_dataloaders = self._val_loaders(model, val)
        self.lr_scheduler_configs = []

        def make_optimizers() -> list[torch.optim.Optimizer]:
            optimizers, self.lr_scheduler_configs = configure(model)
            return optimizers

        self._check_engine(model)
        self.prepared = self.strategy.prepare(StepModule(model), make_optimizers)
        self._wrapped = [wrap_optimizer(o, self.prepared, self.strategy) for o in self.optimizers]
        if not model.automatic_optimization:
            self._wrapped = [_counting(o, self.progress) for o in self._wrapped]
        if checkpoint is not None:
            checkpoints.restore_model(self, checkpoint)
            checkpoints.restore_training(self, checkpoint, ckpt_path or "")
        model.__dict__["_logged"] = self.train_values
        if model.__dict__["_hparams"]:
            for logger in self.loggers_of_this_rank:
                logger.log_hyperparams(model.__dict__["_hparams"])

        self.events.tell("on_fit_start")
        if checkpoint is None:
            self._check_sanity()
        fit_loop.fit(self, model, self.prepared, train_loader)
        self.events.tell("on_fit_end")

    def _evaluate_on_rank(
        self, model: Module, given: Any, ckpt_path: str | Path | None
    ) -> tuple[dict[str, float], int]:
        what, method = (
            ("validation", "val_dataloader")
            if self.state.stage == "validate"
            else ("test", "test_dataloader")
        )
        limit_name = "limit_val_batches" if what == "validation" else "limit_test_batches"
        source = loaders.source_of(method, given, self.datamodule, model, needed=True)
        ready = self._attach_evaluation(source, what, limit_name)
        self._prepare_to_evaluate(model, ckpt_path)
        values = evaluation.evaluate(self, model, self.prepared, ready, what)
        return {name: float(value) for name, value in values.items()}, len(ready)

    def _predict(
        self, model: Module, given: Any, ckpt_path: str | Path | None
    ) -> list[list[Any]]:
        source = loaders.source_of(
            "predict_dataloader", given, self.datamodule, model, needed=True
        )
        ready = self._attach_evaluation(source, "predict", "limit_predict_batches")
        self._prepare_to_evaluate(model, ckpt_path)
        return evaluation.predict(self, model, self.prepared, ready)

    def _prepare_to_evaluate(self, model: Module, ckpt_path: str | Path | None) -> None:
        checkpoint = None if ckpt_path is None else self._read(ckpt_path)
        if not hasattr(self, "prepared") or self.prepared.original is not _step_module_of(
            self.prepared, model
        ):
            self.prepared = self.strategy.prepare(StepModule(model))
        if checkpoint is not None:
            checkpoints.restore_model(self, checkpoint)

    def _read(self, asked: str | Path) -> dict[str, Any]:
        return checkpoints.read(self, checkpoints.find(self, asked))

    # -- loaders

    def _train_loader(self, model: Module, given: Any) -> LimitedLoader:
        source = loaders.source_of("train_dataloader", given, self.datamodule, model, needed=True)
        return loaders.attach(
            loaders.training_loader(source),
            name="the training data loader",
            limit=self.limit_train_batches,
            strategy=self.strategy,
            use_distributed_sampler=self.use_distributed_sampler,
            training=True,
            limit_name="limit_train_batches",
        )

    def _val_loaders(self, model: Module, given: Any) -> list[LimitedLoader]:
        if _is_default(model, "validation_step"):
            return []
        source = loaders.source_of("val_dataloader", given, self.datamodule, model, needed=False)
        if source is None:
            return []
        return self._attach_evaluation(source, "validation", "limit_val_batches")

    def _attach_evaluation(self, source: Any, what: str, limit_name: str) -> list[LimitedLoader]:
        several = loaders.evaluation_loaders(source)
        return [
            loaders.attach(
                loader,
                name=f"the {what} data loader" + (f" {index}" if len(several) > 1 else ""),
                limit=getattr(self, limit_name),
                strategy=self.strategy,
                use_distributed_sampler=self.use_distributed_sampler,
                training=False,
                limit_name=limit_name,
            )
            for index, loader in enumerate(several)
        ]

    # -- what the loop asks

    def accumulation(self, epoch: int) -> int:
        """Return how many batches an optimizer step takes in an epoch."""
        return self._accumulation[max(first for first in self._accumulation if first <= epoch)]

    def validates_in(self, epoch: int) -> bool:
        """Whether an epoch has validation."""
        return self.has_validation and (epoch + 1) % self.check_val_every_n_epoch == 0

    def validate_every(self, batches: float) -> float:
        """Return after how many training batches validation comes; infinity: after the epoch."""
        interval = self.val_check_interval
        if isinstance(interval, int):
            if interval > batches:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {int(batches)} training "
                    "batches of an epoch, so validation would never run: pass a smaller number, or "
                    "check_val_every_n_epoch"
                )
            return interval
        if batches == loaders.UNKNOWN:
            if interval == 1.0:
                return loaders.UNKNOWN
            raise UserCodeError(
                f"the training data loader has no length, so val_check_interval={interval} cannot "
                "be taken of it: pass a number of batches (int)"
            )
        return max(1, int(batches * interval))

    def time_is_up(self) -> bool:
        """Whether max_time has gone by; rank 0's clock counts, so that all ranks stop together."""
        assert self.max_time is not None
        up: bool = self.strategy.broadcast(monotonic() - self._began >= self.max_time)
        return up

    def may_stop(self) -> bool:
        """Whether `should_stop` counts by now."""
        return (
            self.progress.global_step >= self.min_steps
            and self.progress.epoch + 1 >= self.min_epochs
        )

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers that are due after the `count`-th epoch or step."""
        for config in self.lr_scheduler_configs:
            if config.is_due(interval, count):
                config.scheduler.step()

    def after_validation_values(self) -> None:
        """Step the schedulers that wait for a value, before checkpoints are saved."""
        if self.progress.epoch_is_done:
            fit_loop.step_monitored_schedulers(self, self.progress.epoch + 1)

    def end_train_epoch(self) -> None:
        """Tell of the epoch's end, and reduce what was logged in it."""
        values = self.train_values
        values.in_step = False
        self.events.tell_all_but_monitors("on_train_epoch_end")
        epoch_values, for_loggers = values.end_epoch()
        values.in_step = True
        self.take_values(epoch_values, values)
        values.flush()
        # The epoch's values stand at its last step, with the epoch's number.
        values.write({**for_loggers, "epoch": self.current_epoch}, max(0, self.global_step - 1))
        if not self.has_validation and self.progress.epoch_is_done:
            self.after_validation_values()
        self.events.tell_monitors("on_train_epoch_end")

    def take_values(self, values: Mapping[str, Tensor], logged: LoggedValues) -> None:
        """Make logged values known to callbacks and the progress bar."""
        if self.sanity_checking:
            return
        self.callback_metrics.update(
            {name: torch.as_tensor(value) for name, value in logged.step_values.items()}
        )
        self.callback_metrics.update(values)
        self.logged_metrics.update(values)
        if logged is not self.train_values:
            self.train_values.bar.update(logged.bar)

    def validate_during_fit(self) -> None:
        """Run validation in the middle of fit."""
        self.take_values({}, self.train_values)
        self.train_values.flush()
        evaluation.evaluate(
            self,
            self.module,
            self.prepared,
            self.val_dataloaders,
            "validation",
            within_fit=True,
        )

    def _check_sanity(self) -> None:
        if not self.has_validation or self.num_sanity_val_steps == 0:
            return
        limit = loaders.UNKNOWN if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        few = [
            LimitedLoader(one.loader, min(one.batches, limit), one.name)
            for one in self.val_dataloaders
        ]
        self.sanity_checking = True
        self.events.tell("on_sanity_check_start")
        try:
            evaluation.evaluate(
                self, self.module, self.prepared, few, "validation", within_fit=True
            )
        finally:
            self.sanity_checking = False
        self.events.tell("on_sanity_check_end")

    def _check_engine(self, model: Module) -> None:
        capabilities = self.plan.capabilities
        if not model.automatic_optimization:
            if not capabilities.manual_backward:
                raise ConfigurationError(
                    f"the strategy {self.plan.strategy.name!r} runs backward itself, so it cannot "
                    "train a Module with automatic_optimization = False"
                )
            if self.gradient_clip is not None or self._accumulation != {0: 1}:
                raise ConfigurationError(
                    f"{type(model).__name__} has automatic_optimization = False, so "
                    "gradient_clip_val and accumulate_grad_batches do nothing: clip and accumulate "
                    "in training_step"
                )

    # -- for Module and callbacks

    def wrapped_optimizers(self) -> Any:
        """Return the optimizer, or a list of them; their `step` goes through the strategy."""
        return self._wrapped[0] if len(self._wrapped) == 1 else list(self._wrapped)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy."""
        self.strategy.backward(self.prepared, loss, *args, **kwargs)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save the run as it is; every rank calls it, and returns once the file is durable.

        Raises:
            CheckpointContentError: something in it is not plain data; says what.
        """
        if not hasattr(self, "prepared"):
            raise ConfigurationError(
                "save_checkpoint() needs a model that was fitted, validated, tested or predicted "
                "with this Trainer"
            )
        checkpoint = checkpoints.collect(self, weights_only=weights_only)
        self.strategy.save_checkpoint(checkpoint, filepath)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        self.lite.print(*args, **kwargs)


def _call(lite: Lite, function: Any, *args: Any) -> Any:
    """Leave out the first argument that `Lite.launch` hands over."""
    return function(*args)


def _step_module_of(prepared: Prepared, model: Module) -> nn.Module | None:
    original = prepared.original
    return original if isinstance(original, StepModule) and original.module is model else None


def _counting(optimizer: Any, progress: Progress) -> Any:
    """Count the steps that user code takes itself."""
    step = optimizer.step

    def count(closure: Any = None) -> Any:
        result = step(closure)
        progress.global_step += 1
        return result

    optimizer.step = count
    return optimizer


def _is_default(model: Module, method: str) -> bool:
    return getattr(type(model), method) is getattr(Module, method)


def _check_module(model: Any, stage: str) -> None:
    if not isinstance(model, Module):
        raise UserCodeError(
            f"expected a stratagem.Module, received {type(model).__name__}: a plain nn.Module is "
            "trained with Lite, or wrapped in a Module with training_step and configure_optimizers"
        )
    if "_logged" not in model.__dict__:
        raise UserCodeError(
            f"{type(model).__name__}.__init__ does not call super().__init__(); call it first"
        )
    needed = {
        "fit": ("training_step", "configure_optimizers"),
        "validate": ("validation_step",),
        "test": ("test_step",),
        "predict": (),
    }[stage]
    missing = [method for method in needed if _is_default(model, method)]
    if missing:
        raise UserCodeError(
            f"{type(model).__name__} does not define {' and '.join(missing)}, which "
            f"trainer.{stage} needs"
        )


def _split_datamodule(given: Any, datamodule: DataModule | None) -> tuple[Any, DataModule | None]:
    if isinstance(given, DataModule):
        given, datamodule = None, given
    if given is not None and datamodule is not None:
        raise ConfigurationError(
            "both data loaders and a datamodule were passed; pass one of them"
        )
    return given, datamodule


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least {least}")


def _check_fast_dev_run(value: bool | int) -> int:
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"fast_dev_run={value!r}: expected True, False, or a number of batches"
        )
    return int(value)


def _check_accumulation(value: int | Mapping[int, int]) -> dict[int, int]:
    schedule = {0: value} if isinstance(value, int) else dict(value)
    for first, count in schedule.items():
        _check_whole("accumulate_grad_batches (an epoch)", first, 0)
        _check_whole("accumulate_grad_batches", count, 1)
    schedule.setdefault(0, 1)
    return schedule


def _gradient_clip(value: float | None, algorithm: str) -> GradientClip | None:
    if algorithm not in ("norm", "value"):
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r}: expected 'norm' or 'value'"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigurationError(f"gradient_clip_val={value!r}: expected a number above 0, or None")
    return GradientClip(float(value), "value" if algorithm == "value" else "norm") if value else None


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return timedelta(**value).total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        days, hours, minutes, seconds = map(int, parts)
        return timedelta(
            days=days, hours=hours, minutes=minutes, seconds=seconds
        ).total_seconds()
    raise ConfigurationError(
        f"max_time={value!r}: expected a timedelta, 'DD:HH:MM:SS', a dict of its arguments, or "
        "seconds"
    )


def _check_deterministic(value: bool | str) -> None:
    if value not in (True, False, "warn"):
        raise ConfigurationError(f"deterministic={value!r}: expected True, False or 'warn'")


def _set_determinism(deterministic: bool | str, benchmark: bool) -> Any:
    """Set torch's modes; return what sets them back."""
    if not deterministic and not benchmark:
        return lambda: None
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    if deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    torch.backends.cudnn.benchmark = benchmark and not deterministic

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]

    return restore


def _check_state_keys(callbacks: Sequence[Callback]) -> None:
    keys = [c.state_key for c in callbacks if type(c).state_dict is not Callback.state_dict]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigurationError(
            f"several callbacks have the state_key {twice[0]!r}, so their states would overwrite "
            "one another in a checkpoint: give them different arguments, or override state_key"
        )


def _by_loader(values: Mapping[str, float], count: int) -> list[dict[str, float]]:
    """Return the values of each loader; what is logged for all of them is in each dict."""
    if count == 1:
        return [dict(values)]
    suffixes = [f"/dataloader_idx_{index}" for index in range(count)]
    return [
        {
            name: value
            for name, value in values.items()
            if name.endswith(suffix) or not name.endswith(tuple(suffixes))
        }
        for suffix in suffixes
    ]


def _print_values(stage: str, values: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=stage)
    table.add_column("value")
    table.add_column("", justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:.6g}")
    Console(file=sys.stdout).print(table)
