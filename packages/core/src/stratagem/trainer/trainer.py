"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.callbacks import Callback, ModelCheckpoint, ProgressBar
from stratagem.datamodule import DataModule
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.strategy import PreparedModel, Strategy
from stratagem.lite.lite import Lite
from stratagem.loggers import CSVLogger, Logger
from stratagem.module import Module
from stratagem.plan.plan import RunPlan
from stratagem.storage import paths
from stratagem.trainer import options
from stratagem.trainer.metrics import Metrics
from stratagem.trainer.optimizers import SchedulerConfig
from stratagem.trainer.progress import Progress
from stratagem.trainer.resume.checkpoint import collect_checkpoint
from stratagem.trainer.run import Run

Devices = int | str | list[int] | tuple[int, ...] | None


@dataclass
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
        benchmark: let the accelerator's libraries choose kernels by trying them out.
        inference_mode: evaluate under inference_mode, not no_grad.
        use_distributed_sampler: divide data between ranks.
        sync_batchnorm: batch norm layers take their statistics over all ranks.
        detect_anomaly: check each loss and backward for NaN; slow.
        detect_divergence: compare step and parameters of the ranks after so many optimizer steps
            (True: 100).
        enable_checkpointing: add a ModelCheckpoint if there is none.
        async_save: write checkpoints while training goes on; needs memory of the host for a copy.
        enable_progress_bar: add a ProgressBar if there is none.
        default_root_dir: where logs and checkpoints go; None: the current folder. With a URL, the
            checkpoints of a ModelCheckpoint without `dirpath` go to its `checkpoints`, and logs to
            the current folder.
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
        sync_batchnorm: bool = False,
        detect_anomaly: bool = False,
        detect_divergence: bool | int = False,
        enable_checkpointing: bool = True,
        async_save: bool = False,
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
            async_save=async_save,
            gpus=gpus,
            tpu_cores=tpu_cores,
        )
        if sync_batchnorm:
            self.strategy.sync_batchnorm = True
        self.default_root_dir = paths.at(
            Path.cwd() if default_root_dir is None else default_root_dir
        )

        # How long, and how much of the data.
        self.fast_dev_run = options.check_fast_dev_run(fast_dev_run)
        if self.fast_dev_run:
            quick = int(self.fast_dev_run)
            limit_train_batches = limit_val_batches = quick
            limit_test_batches = limit_predict_batches = quick
            max_epochs, max_steps, val_check_interval, num_sanity_val_steps = 1, quick, 1.0, 0
            check_val_every_n_epoch = 1
        self.max_time = options.seconds(max_time)
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
            options.check_whole(name, value, least)
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.min_epochs = min_epochs or 0
        self.min_steps = min_steps or 0
        limits = {
            "train": limit_train_batches,
            "val": limit_val_batches,
            "test": limit_test_batches,
            "predict": limit_predict_batches,
        }
        self.limits = {
            what: options.check_limit(f"limit_{what}_batches", limit)
            for what, limit in limits.items()
        }
        self.val_check_interval = options.check_limit("val_check_interval", val_check_interval)
        if self.val_check_interval == 0:
            raise ConfigurationError(
                "val_check_interval=0: expected at least one batch (int) or a fraction above 0"
            )
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = num_sanity_val_steps
        self.log_every_n_steps = log_every_n_steps
        self.use_distributed_sampler = use_distributed_sampler

        # A training step.
        self._accumulation = options.check_accumulation(accumulate_grad_batches)
        self.gradient_clip = options.gradient_clip(gradient_clip_val, gradient_clip_algorithm)
        self.strategy.take_step_options(clip=self.gradient_clip, accumulation=self._accumulation)
        self.detect_anomaly = detect_anomaly
        self.detect_divergence = options.check_divergence(detect_divergence)
        self.inference_mode = inference_mode
        self.deterministic = options.check_deterministic(deterministic)
        self.benchmark = benchmark

        # Who is told.
        self.loggers = self._loggers(logger)
        self.callbacks = self._callbacks(callbacks, enable_checkpointing, enable_progress_bar)

        # Where a run stands.
        self.progress = Progress()
        self.state = RunState()
        self.run: Run | None = None
        """The present run, or the one before."""
        self._trained_elsewhere: Module | None = None
        """The model of the last run, where that was in processes of its own."""
        self.should_stop = False
        """Set to True, on every rank alike, to end training after the present step."""
        self._callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        """The latest epoch values."""

    def _loggers(self, logger: Any) -> list[Logger]:
        if self.fast_dev_run or logger is False:
            return []
        if logger is None or logger is True:
            root = self.default_root_dir
            return [CSVLogger(Path.cwd() if paths.is_url(root) else root)]
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
    def is_within_step(self) -> bool:
        """Whether batches were read for an optimizer step that is yet to be taken.

        So it is in `on_train_batch_start`, and in `on_train_batch_end` of all but the last batch
        that is accumulated.
        """
        return self.run is not None and self.run.is_within_step

    @property
    def has_validation(self) -> bool:
        """Whether this fit validates."""
        return self.run is not None and bool(self.run.val_loaders)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether validation comes in the middle of epochs too, not only after their last batch."""
        return self.has_validation and self.val_check_interval != 1.0

    @property
    def has_validated(self) -> bool:
        """Whether validation ran in the present epoch."""
        return self.run is not None and self.run.validated_epoch == self.progress.epoch

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of everything that was logged."""
        if self.run is not None:
            self.take_values(self.run.train_values, {})
        return self._callback_metrics

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
    def checkpoint_root(self) -> paths.Location:
        """The folder in which checkpoints get one of their own: that of the logs, or a URL."""
        root = self.default_root_dir
        return root if paths.is_url(root) else Path(self.log_dir)

    @property
    def run_id(self) -> str:
        """A name of the present fit, the same on every rank; a resumed one keeps the first's."""
        return self.last_run.run_id

    def agreed_time(self) -> float:
        """Return the seconds since the run began, the same on every rank; see `Interruption`."""
        return self.last_run.interruption.agreed_time()

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The values for the progress bar."""
        return self.last_run.train_values.bar

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, once the model is prepared."""
        return self._prepared.optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning rate schedulers, once the model is prepared."""
        return self.last_run.schedulers

    @property
    def sanity_checking(self) -> bool:
        """Whether these are the validation batches that are run before training."""
        return self.run is not None and self.run.sanity_checking

    @property
    def num_training_batches(self) -> float:
        """Batches of this rank in an epoch; infinity if that is not known."""
        loader = self.last_run.train_loader
        return 0 if loader is None else loader.batches

    @property
    def last_run(self) -> Run:
        """The present run, or the one before.

        Raises:
            ConfigurationError: there was none.
        """
        if self.run is None and self._trained_elsewhere is not None:
            raise ConfigurationError(
                f"the run was in processes of its own (launcher {self.plan.launcher.name!r}), of "
                "which only the model's weights, logged values and callbacks' states come back: "
                "read this in a callback or in the Module, or train with strategy='ddp' in a script"
            )
        if self.run is None:
            raise ConfigurationError(
                "this needs a model that was fitted, validated, tested or predicted with this "
                "Trainer; there was none yet"
            )
        return self.run

    @property
    def _prepared(self) -> PreparedModel:
        prepared = self.last_run.prepared
        if prepared is None:
            raise ConfigurationError(
                "this needs a prepared model, but the last run ended before it was there"
            )
        return prepared

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
            ckpt_path: checkpoint to resume from: a path or URL; "last", the newest that is whole;
                or "best"; None: begin anew. Where the cluster has started the run again (torchrun
                with restarts, a SLURM job that was queued again), the last whole checkpoint that it
                has saved goes before.

        Raises:
            UserCodeError: the model or a loader does not keep its contract.
            CheckpointError: the checkpoint cannot be used.
            RankFailedError: another rank failed.
        """
        _check_module(model, "fit", makes_optimizers=self.strategy.makes_optimizers)
        train_dataloaders, datamodule = _split_datamodule(train_dataloaders, datamodule)
        self._execute("fit", model, datamodule, train_dataloaders, val_dataloaders, ckpt_path)

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
            ckpt_path: weights to load before: a path or URL, "last" or "best".
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
        predictions = self._execute("predict", model, datamodule, dataloaders, ckpt_path)
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
        values, count = self._execute(stage, model, datamodule, dataloaders, ckpt_path)
        if verbose and self.is_global_zero:
            _print_values(stage, values)
        return _by_loader(values, count)

    def _model_or_last(self, model: Module | None) -> Module:
        if model is not None:
            return model
        if self.run is None and self._trained_elsewhere is not None:
            return self._trained_elsewhere
        if self.run is None:
            raise ConfigurationError(
                "there is no model: pass one, or fit one with this Trainer before"
            )
        return self.run.module

    def _execute(self, stage: str, model: Module, datamodule: DataModule | None, *args: Any) -> Any:
        """Launch, and run on every rank."""
        self.state = RunState(stage, "running")
        try:
            if self.plan.runs_elsewhere and not self.lite.is_launched:
                result = self._execute_elsewhere(stage, model, datamodule, *args)
            else:
                result = self.lite.launch(self._run_on_rank, stage, model, datamodule, *args)
        except BaseException:
            self.state.status = "interrupted"
            raise
        self.state = RunState("", "finished")
        return result

    def _execute_elsewhere(
        self, stage: str, model: Module, datamodule: DataModule | None, *args: Any
    ) -> Any:
        """Run in new processes, then take over what comes back: weights and logged values."""
        outcome = self.lite.launch(self._run_and_report, stage, model, datamodule, *args)
        if outcome is None:
            return None  # rank 0 has ended itself, by sys.exit()
        if not set(model.state_dict()) >= set(outcome["weights"]):
            model.configure_model()
        model.load_state_dict(outcome["weights"])
        self._callback_metrics.update(outcome["callback_metrics"])
        self.logged_metrics.update(outcome["logged_metrics"])
        states = outcome["callbacks"]
        for callback in self.callbacks:
            if (state := callback.own_state(states)) is not None:
                callback.load_state_dict(state)
        self.progress.load_state_dict(outcome["progress"])
        self._trained_elsewhere = model
        return outcome["result"]

    def _run_and_report(self, lite: Lite, stage: str, model: Module, *args: Any) -> dict[str, Any]:
        """In a process of its own: run, and return what the launching process takes over."""
        result = self._run_on_rank(lite, stage, model, *args)
        states = {c.state_key: c.state_dict() for c in self.callbacks}
        return {
            "result": result,
            "weights": self.strategy.model_state(self._prepared),
            "callback_metrics": dict(self.callback_metrics),
            "logged_metrics": dict(self.logged_metrics),
            "callbacks": {key: state for key, state in states.items() if state},
            "progress": self.progress.state_dict(),
        }

    def _run_on_rank(
        self, lite: Lite, stage: str, model: Module, datamodule: DataModule | None, *args: Any
    ) -> Any:
        model.__dict__["_trainer"] = self
        if datamodule is not None:
            datamodule.trainer = self
        if self.run is not None and self.run.module is model:
            wanted = []  # its callbacks are there, with what they have seen
        else:
            wanted = model.configure_callbacks()
        wanted = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        kinds = tuple(type(callback) for callback in wanted)
        self.callbacks = [c for c in self.callbacks if type(c) not in kinds] + wanted
        if self.fast_dev_run:
            self.callbacks = [c for c in self.callbacks if not isinstance(c, ModelCheckpoint)]
        _check_state_keys(self.callbacks)
        if stage == "fit":
            self.should_stop = False
            # A checkpoint, if one is given, says where to go on; otherwise every fit begins anew.
            self.progress = Progress()
        self.run = Run(self, stage, model, datamodule, self.run)
        return self.run.execute(*args)

    # -- for Module, callbacks and the run

    def accumulation(self, epoch: int) -> int:
        """Return how many batches an optimizer step takes in an epoch."""
        return self._accumulation[max(first for first in self._accumulation if first <= epoch)]

    def metric(self, name: str, who: str) -> Tensor:
        """Return the latest logged value that somebody (`who`) waits for.

        Raises:
            UserCodeError: nothing of that name was logged; lists what was.
        """
        value = self.callback_metrics.get(name)
        if value is None:
            there = ", ".join(sorted(self.callback_metrics)) or "nothing"
            raise UserCodeError(
                f"{who}(monitor={name!r}): no value of that name was logged; there is {there}. "
                f"Log it in the Module with self.log({name!r}, ...)"
            )
        return value

    def take_values(self, logged: Metrics, of_epoch: Mapping[str, Tensor]) -> None:
        """Keep the latest values, of steps and of an epoch, for callbacks."""
        of_step = logged.take_step_values()
        self._callback_metrics.update({k: torch.as_tensor(v) for k, v in of_step.items()})
        self._callback_metrics.update(of_epoch)
        self.logged_metrics.update(of_epoch)

    def wrapped_optimizers(self) -> Any:
        """Return the optimizer, or a list of them; their `step` goes through the strategy."""
        wrapped = self.last_run.optimizers
        return wrapped[0] if len(wrapped) == 1 else list(wrapped)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy."""
        self.strategy.backward(self._prepared, loss, *args, **kwargs)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save the run as it is; every rank calls it, and returns once the file is durable.

        Within an optimizer step (`is_within_step`) there is no state to resume from exactly, so the
        file is there once the step is taken, before anything else happens; weights alone are saved
        at once.

        With `async_save=True` it returns once the state is copied.

        Raises:
            CheckpointContentError: something in it is not plain data; says what.
        """
        filepath = paths.at(filepath)
        if self.is_within_step and not weights_only:
            self.last_run.saves_due.append(filepath)
            return
        checkpoint = collect_checkpoint(self.last_run, self._prepared, weights_only=weights_only)
        self.strategy.save_checkpoint(checkpoint, filepath)
        restarts = self.last_run.restarts
        if restarts is not None and not weights_only:
            self.strategy.checkpoint_io.when_durable(partial(restarts.saved, filepath))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        self.lite.print(*args, **kwargs)


# Methods of the library that our users come from, which are not called here.
_UNCALLED = (
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_epoch_end",
    "training_step_end",
    "transfer_batch_to_device",
    "validation_epoch_end",
)


def _check_module(model: Any, stage: str, *, makes_optimizers: bool = False) -> None:
    if not isinstance(model, Module):
        raise UserCodeError(
            f"expected a stratagem.Module, received {type(model).__name__}: a plain nn.Module is "
            "trained with Lite, or wrapped in a Module with training_step and configure_optimizers"
        )
    if "_logged" not in model.__dict__:
        raise UserCodeError(
            f"{type(model).__name__}.__init__ does not call super().__init__(); call it first"
        )
    if uncalled := sorted(name for name in _UNCALLED if hasattr(model, name)):
        raise UserCodeError(
            f"{type(model).__name__} defines {' and '.join(uncalled)}, which Stratagem does not "
            "call, so training would differ silently: use automatic_optimization = False, a "
            "Callback or a Strategy for what they do"
        )
    needed = {
        "fit": ("training_step", "configure_optimizers"),
        "validate": ("validation_step",),
        "test": ("test_step",),
        "predict": (),
    }[stage]
    missing = [method for method in needed if not model.defines(method)]
    if makes_optimizers and "configure_optimizers" in missing:
        missing.remove("configure_optimizers")
    if missing:
        raise UserCodeError(
            f"{type(model).__name__} does not define {' and '.join(missing)}, which "
            f"trainer.{stage} needs"
        )


def _split_datamodule(given: Any, datamodule: DataModule | None) -> tuple[Any, DataModule | None]:
    if isinstance(given, DataModule):
        given, datamodule = None, given
    if given is not None and datamodule is not None:
        raise ConfigurationError("both data loaders and a datamodule were passed; pass one of them")
    return given, datamodule


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
