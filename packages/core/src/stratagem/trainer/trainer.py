"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.process import numpy_warned_once
from stratagem.launch.rank import leave_unprinted
from stratagem.loggers.adapted import Loggers, make_loggers
from stratagem.module.datamodule import DataModule
from stratagem.module.module import Module
from stratagem.plan.step_options import Compilation, StepOptions, gradient_clip, seconds
from stratagem.runtime.runtime import Devices, Plugin, Runtime, as_list, public_call
from stratagem.storage import paths
from stratagem.trainer.attributes import TrainerAttributes
from stratagem.trainer.checks import (
    check_divergence_detection,
    check_folders_before_launch,
    check_launch_arguments,
    check_manual_optimization,
    check_module,
    check_not_running,
    warn_on_refit,
)
from stratagem.trainer.context import FitState, RunState, StepPolicy
from stratagem.trainer.hooks import find_callbacks, make_callbacks, merge_callbacks
from stratagem.trainer.job import Job, Stage, collect_result, load_result
from stratagem.trainer.metrics.metrics import LatestMetrics
from stratagem.trainer.options import (
    Interval,
    TrainerOptions,
    check_accumulation,
    check_interval,
    check_limit,
    check_switch,
    none_means_default,
    root_folder,
)

if TYPE_CHECKING:
    from stratagem.profilers import Profiler
    from stratagem.trainer.context import StepContext
    from stratagem.trainer.step.batches import BatchFeed, IndexedBatch
    from stratagem.trainer.step.step import Step

TrainerType = TypeVar("TrainerType", bound="Trainer")

_DIVERGENCE_INTERVAL = 100
"""The number of optimizer steps between two comparisons with `detect_divergence=True`."""


class Trainer(TrainerAttributes):
    """Trains, validates and tests models, and predicts with them.

    Args:
        accelerator: a name, an Accelerator, or "auto".
        strategy: a name, a Strategy, or "auto". On several devices, "auto" chooses "ddp", or a
            strategy that shards the model if it does not fit on one device.
        devices: the number of devices, a list of their indices, -1 for all, or "auto".
        num_nodes: the number of machines.
        precision: a name ("32-true", "bf16-mixed", ...), 64, 32, 16, "bf16", or a Precision.
        plugins: CheckpointIO, ClusterEnvironment, Launcher or Precision objects, or their names.
        logger: a Logger or its name ("tensorboard", ...), or a list of several. True: a CSVLogger.
            False: no logger.
        callbacks: a Callback, the name of an installed callback, or a list of several. A run calls
            them in this order, each ModelCheckpoint after the others.
        max_epochs: the number of epochs to train; -1: no limit. Default: 1000, or no limit if
            `max_steps` or `max_time` is set.
        min_epochs, min_steps: the least number of epochs and optimizer steps to train;
            `should_stop` has no effect before both.
        max_steps: the number of optimizer steps to train; -1: no limit.
        max_time: the time to train: a timedelta, "DD:HH:MM:SS", or seconds.
        fast_dev_run: run this number of batches (True: 1) in training, validation, testing and
            predicting, without loggers and checkpoints.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: the
            number of batches to run (int), or a fraction of them (float).
        val_check_interval: validate after this number of batches (int), this fraction of an epoch
            (float), or this time (a timedelta, "DD:HH:MM:SS", or a dict of timedelta's arguments).
        check_val_every_n_epoch: validate in every n-th epoch. None: validate in any epoch, and
            count the batches of `val_check_interval` over epochs.
        num_sanity_val_steps: the number of validation batches to run before training; -1: all.
        log_every_n_steps: send the values of every n-th step to the loggers.
        accumulate_grad_batches: the number of batches in an optimizer step. A dict sets it by
            epoch: {0: 8, 4: 4} means 8 from epoch 0 on, and 4 from epoch 4 on.
        gradient_clip_val: the largest norm or value of gradients. None or 0: no clipping.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: use deterministic algorithms. "warn": only warn about operations without a
            deterministic algorithm.
        benchmark: let the accelerator's libraries time several kernels and choose the fastest.
        inference_mode: validate, test and predict under `torch.inference_mode`. Validation within a
            fit always runs under `torch.no_grad`.
        use_distributed_sampler: split the data over the ranks.
        sync_batchnorm: compute the statistics of batch norm layers over all ranks.
        compile: True: compile the model with `torch.compile`. A dict: arguments of
            `torch.compile`. See docs/guides/compiling.md.
        activation_checkpointing: compute activations of modules again in backward, in place of
            keeping them. True: the layers of ModuleLists and Sequentials. A class or a set of
            classes; names such as "layers.*"; a function of a module; or a
            `stratagem.strategies.Recompute`, which keeps some operations' outputs.
        detect_anomaly: check each loss and each backward pass for NaN; slow.
        detect_divergence: compare the step and the parameters of all ranks every n optimizer steps
            (True: 100).
        enable_checkpointing: add a ModelCheckpoint unless `callbacks` has one.
        async_save: write checkpoints in the background, from a copy in host memory.
        enable_progress_bar: add a ProgressBar unless `callbacks` has one.
        enable_model_summary: add a ModelSummary (from `stratagem-extras`) unless `callbacks` has
            one. It prints a table of the layers to stderr.
        enable_autolog_hparams: send the hyperparameters of the model and the DataModule to the
            loggers at the start of a run.
        overfit_batches: train on this number of batches (int) or this fraction of them (float), in
            the same order in each epoch, and validate on as many. 0.0: train on all batches.
        reload_dataloaders_every_n_epochs: create the loaders again after this number of epochs; 0:
            never.
        profiler: "simple", "advanced", "pytorch" or a Profiler. None: no profiling, at no cost.
        weights: a folder of safetensors in Hugging Face's layout, or a PretrainedWeights, which a
            run loads into a new model unless it loads a checkpoint. This needs `stratagem-extras`.
        default_root_dir: the folder for logs and checkpoints. Default: the current folder. If this
            is a URL, checkpoints without a `dirpath` go to its subfolder `checkpoints`, and logs go
            to the current folder.

    Attributes:
        options: the options of runs. A user may replace them between two runs:
            `trainer.options = dataclasses.replace(trainer.options, max_epochs=20)`.
        callbacks: the user's callbacks and the added ones.
        loggers: all loggers.
        should_stop: set this to True on every rank to end training after the current step. A fit
            that only some ranks stop ends with an error that names the others.

    Raises:
        ConfigurationError: if the arguments do not work together. No process was started then.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.plan.strategy.name
        'single_device'
    """

    policy = StepPolicy()
    """How the loop and the steps differ from the default; a subclass may have another policy."""
    _gives_hints = True
    """Whether RunHints measures the runs; False: a short extra run, such as a trial."""

    @public_call
    @none_means_default
    def __init__(
        self,
        *,
        accelerator: Accelerator | str = "auto",
        strategy: Strategy | str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Precision | str | int = "32-true",
        plugins: Plugin | Sequence[Plugin] | None = None,
        logger: Loggers = None,
        callbacks: Callback | str | Sequence[Callback | str] | None = None,
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
        val_check_interval: Interval = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 1,
        accumulate_grad_batches: int | Mapping[int, int] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        deterministic: bool | Literal["warn"] = False,
        benchmark: bool = False,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        compile: bool | Mapping[str, Any] = False,
        activation_checkpointing: Any = None,
        detect_anomaly: bool = False,
        detect_divergence: bool | int = False,
        enable_checkpointing: bool = True,
        async_save: bool = False,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = False,
        enable_autolog_hparams: bool = True,
        overfit_batches: int | float = 0.0,
        reload_dataloaders_every_n_epochs: int = 0,
        profiler: Profiler | str | None = None,
        weights: Any = None,
        default_root_dir: str | Path | None = None,
    ) -> None:
        policy: Any = type(self).policy
        if not isinstance(policy, (StepPolicy, property)):
            raise ConfigurationError(
                f"{type(self).__name__}.policy is {policy!r}: expected an object, such as "
                "StepPolicy(validates_at_stop=True)"
            )
        own_callbacks = find_callbacks(callbacks)
        overfit = check_limit("overfit_batches", overfit_batches)
        max_seconds = seconds(max_time)
        if max_epochs is None:
            max_epochs = 1000 if max_steps == -1 and max_seconds is None else -1
        if weights is not None:
            from stratagem.checkpoint import PretrainedWeights

            weights = PretrainedWeights.of(weights)
        options = TrainerOptions(
            max_epochs=max_epochs,
            min_epochs=min_epochs or 0,
            max_steps=max_steps,
            min_steps=min_steps or 0,
            max_time=max_seconds,
            limit_train_batches=overfit or check_limit("limit_train_batches", limit_train_batches),
            limit_val_batches=overfit or check_limit("limit_val_batches", limit_val_batches),
            limit_test_batches=check_limit("limit_test_batches", limit_test_batches),
            limit_predict_batches=check_limit("limit_predict_batches", limit_predict_batches),
            val_check_interval=check_interval(val_check_interval),
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            step_options=StepOptions(
                clip=gradient_clip(gradient_clip_val, gradient_clip_algorithm),
                accumulation=check_accumulation(accumulate_grad_batches, own_callbacks),
                sync_batchnorm=sync_batchnorm,
                compilation=Compilation.parse(compile),
                activation_checkpointing=activation_checkpointing,
            ),
            deterministic=deterministic,
            benchmark=benchmark,
            inference_mode=inference_mode,
            use_distributed_sampler=use_distributed_sampler,
            detect_anomaly=detect_anomaly,
            detect_divergence=check_switch(
                "detect_divergence", detect_divergence, unit="steps", on=_DIVERGENCE_INTERVAL
            ),
            enable_autolog_hparams=enable_autolog_hparams,
            overfit_batches=overfit,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
            default_root_dir=root_folder(default_root_dir),
            weights=weights,
        )
        quick = check_switch("fast_dev_run", fast_dev_run, unit="batches", on=1)
        self.options = options.for_quick_run(quick) if quick else options
        self._runtime = Runtime(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            async_save=async_save,
            step_options=options.step_options,
        )
        check_launch_arguments(self.plan, options.step_options)
        check_divergence_detection(self.plan, self.strategy.ranks, options.detect_divergence)
        self.loggers = [] if quick else make_loggers(logger, options.default_root_dir)
        self._profiler = None
        if profiler is not None:
            from stratagem.profilers.profiler import make_profiler

            self._profiler = make_profiler(profiler)
        self.callbacks = make_callbacks(
            own_callbacks,
            checkpointing=enable_checkpointing,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
        )
        self._forget_runs()

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current step and the minimum of training."""
        return bool(self._fit_state.stop_requests)

    @should_stop.setter
    def should_stop(self, ends: bool) -> None:
        requests = self._fit_state.stop_requests
        if ends:
            requests.add(None)
        else:
            requests.clear()

    def _forget_runs(self) -> None:
        self._state, (self._fit_state, self._latest) = RunState(), (FitState(), LatestMetrics())
        self._run = self._opened = self._remote_model = None

    def with_options(
        self: TrainerType,
        options: TrainerOptions,
        callbacks: Callback | Sequence[Callback] | None = None,
    ) -> TrainerType:
        """Return a new Trainer with the same plan, strategy and processes, and other options.

        The new Trainer is for short extra runs, such as trials. It has no loggers and no profiler.

        Args:
            options: the new Trainer's options, such as
                `dataclasses.replace(trainer.options, max_steps=3)`.
            callbacks: all callbacks of the new Trainer. None: no callbacks.

        Example:
            >>> from dataclasses import replace
            >>> from stratagem import Trainer
            >>> trainer = Trainer(accelerator="cpu", devices=1, logger=False)
            >>> short = trainer.with_options(replace(trainer.options, max_steps=3))
            >>> short.options.max_steps, short.strategy is trainer.strategy
            (3, True)
        """
        other = copy(self)
        other.options, other.callbacks = options, as_list(callbacks)
        other.loggers, other._profiler = [], None
        other._gives_hints = False
        other._forget_runs()
        return other

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            (print if bar is None else bar.print)(*args, **kwargs)

    # -- the four runs

    @public_call
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
            model: the model to train.
            train_dataloaders: a DataLoader or another iterable of batches, or a DataModule.
                Default: the loader of `datamodule` or of the model.
            val_dataloaders: the validation loader, or a list of several.
            datamodule: a DataModule, instead of loaders.
            ckpt_path: the checkpoint to resume from: a path, a URL, "last" (the newest complete
                checkpoint) or "best". None: start from the beginning. If the cluster restarted the
                run (torchrun with restarts, a requeued SLURM job), the run resumes from its own
                last complete checkpoint instead.

        Raises:
            ConfigurationError: if this Trainer is already running.
            UserCodeError: if the model or a loader does not follow its interface.
            CheckpointError: if the checkpoint cannot be used.
            RankFailedError: if another rank failed.
        """
        job = Job.of("fit", model, train_dataloaders, datamodule, ckpt_path, val_dataloaders)
        with self._executing(job) as execute:
            execute()

    @public_call
    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Validate a model; return a list with a dict of metrics for each loader.

        Args:
            model: the model to validate. Default: the model of the last run.
            dataloaders: a loader, or a list of several. Default: the loaders of `datamodule` or of
                the model.
            datamodule: a DataModule, instead of loaders.
            ckpt_path: the checkpoint to load weights from: a path, a URL, "last" or "best".
            verbose: if True, print the metrics.
        """
        job = Job.of("validate", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        return self._evaluate(job, verbose)

    @public_call
    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Test a model; return a list with a dict of metrics for each loader.

        Args:
            model, dataloaders, datamodule, ckpt_path, verbose: as in `validate`.
        """
        job = Job.of("test", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        return self._evaluate(job, verbose)

    @public_call
    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> Any:
        """Predict with a model; return the predictions for this rank's part of the data.

        Args:
            model, dataloaders, datamodule, ckpt_path: as in `validate`.
            return_predictions: if False, drop the predictions; callbacks still receive each of
                them. Default: True.

        Returns:
            A list with the result of `predict_step` for each batch. With several loaders, a list of
            such lists. None if the predictions are dropped.
        """
        job = Job.of("predict", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        keeps = return_predictions is not False
        job = replace(job, keeps_predictions=keeps)
        with self._executing(job) as execute:
            predictions = execute()
        if not keeps:
            return None
        return predictions[0] if len(predictions) == 1 else predictions

    @public_call
    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save a checkpoint of the run; call it on every rank.

        It returns when the file is durable, or with `async_save=True`, when the state is copied.

        Within an optimizer step (`is_within_step`), the run has no state to resume from exactly. So
        the checkpoint is saved directly after the step. With `weights_only=True`, a save is
        immediate.

        Args:
            filepath: the path of the checkpoint.
            weights_only: if True, leave out the state of the training.

        Raises:
            CheckpointContentError: if the checkpoint contains a value that is not
                weights-only-safe. The error names the value.
        """
        self.run.saves.save(paths.parse_user_path(filepath), weights_only=weights_only)

    # -- executing a run

    def _model_or_last(self, model: Module | None) -> Module:
        model = self.model if model is None else model
        if model is None:
            raise ConfigurationError(
                "there is no model: pass one, or fit one with this Trainer before"
            )
        return model

    def _evaluate(self, job: Job, verbose: bool) -> list[dict[str, float]]:
        with self._executing(job) as execute:
            values, of_loaders = execute()
        if verbose and self.is_global_zero:
            from stratagem.trainer.loops.evaluation import print_values

            print_values(job.stage, values)
        return list(of_loaders)

    @contextmanager
    def _executing(self, job: Job) -> Iterator[Callable[[], Any]]:
        """Check a job, and yield the function that executes it on every rank; note how it ends."""
        check_not_running(self._state, job.stage)
        check_module(job, makes_optimizers=self.strategy.makes_optimizers)
        if job.stage == "fit":
            self.runtime.divide(job.model)
            self.strategy.check_model(job.model)
            options = self.options.step_options
            check_manual_optimization(job.model, self.plan, self.strategy, options)
            check_divergence_detection(
                self.plan, self.strategy.ranks, self.options.detect_divergence
            )
        self._state = RunState(job.stage, "running", job.stage)
        try:
            check_folders_before_launch(self, self.runtime, job.stage)
            with numpy_warned_once():
                start = self.runtime.starter()
                if self.plan.remote and not self.runtime.is_launched:
                    yield partial(self._execute_remotely, start, job)
                else:
                    yield partial(start, self.run_on_rank, job)
        except BaseException as error:
            self._state.status = "interrupted"
            if isinstance(error, KeyboardInterrupt):
                leave_unprinted(error)  # in two lines, by the rank that shows it
            raise
        self._state = RunState("", "finished", job.stage)

    def _execute_remotely(self, start: Callable[..., Any], job: Job) -> Any:
        """Run a job in new processes, then load the state that rank 0 returns."""
        outcome = start(self.run_on_rank, job, reports=True)
        if outcome is None:
            return None  # rank 0 has ended itself, by sys.exit()
        result = load_result(outcome, job.model, self, latest=self._latest, state=self._fit_state)
        self._remote_model = job.model
        return result

    def run_on_rank(self, job: Job, *, reports: bool = False) -> Any:
        """Execute a run in this process, which is a rank of the run.

        Args:
            job: the request.
            reports: return the state of the run as well, for the process that has launched it.
        """
        # Only runs need these modules, which take a quarter of the Trainer's import time.
        from stratagem.trainer import run as runs
        from stratagem.trainer.loops.fit import fit

        with self.runtime.set_up_rank():
            job.attach(self)
            if self._run is None or self._run.module is not job.model:
                added = as_list(job.model.configure_callbacks())
                self.callbacks = merge_callbacks(self.callbacks, added)
            if job.stage == "fit":
                warn_on_refit(self, None if self._run is None else self._run.job, job)
            self._opened = None
            self._fit_state, self._latest = self.begin_run(job)
            run = self._run = runs.Run(self, job, before=self._run)
            with runs.set_up(run):
                if job.stage == "fit":
                    result = None
                    with runs.prepare_fit(run) as context:
                        fit(context, run.state)
                else:
                    result = runs.EVALUATIONS[job.stage](run)
            if reports:
                return collect_result(self, run.require_prepared(), run.state, result)
            return result

    def open_data(
        self, stage: Stage, model: Module, loaders: Any = None, datamodule: DataModule | None = None
    ) -> None:
        """Create the loaders of a run without executing it.

        `train_dataloader` and `val_dataloaders` show the loaders until the next run. The Tuner
        calls this between two runs, after it has found a batch size. Processes have to be launched
        before.

        Args:
            stage: the run: "fit", "validate", "test" or "predict".
            model, loaders, datamodule: as in the method of that name.
        """
        from stratagem.trainer.run import Run

        check_not_running(self._state, "open_data")
        job = Job.of(stage, model, loaders, datamodule, None)
        job.attach(self)
        run = self._opened = Run(self.with_options(self.options), job, before=None)
        if stage == "fit":
            run.open_fit_data()
        else:
            run.open_evaluation_data()

    # -- methods that a subclass may override

    def begin_run(self, job: Job) -> tuple[FitState, LatestMetrics]:
        """Return the state of the training loop and the store of logged values for the next run.

        Called on every rank, which is set up.

        A fit starts from the beginning, unless it loads a checkpoint, and callbacks wait for values
        of this fit. Other runs continue with those of the last fit.
        """
        if job.stage == "fit":
            return FitState(), LatestMetrics()
        return self.fit_state, self.latest_metrics

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add a subclass's entries to a checkpoint; called on every rank before the hooks."""

    def make_train_step(self, context: StepContext) -> Step:
        """Return the optimizer step of a fit; called once per fit, before the first epoch."""
        from stratagem.trainer.step.step import Step, make_step

        return make_step(context, Step)

    def make_sharded_loader(
        self, loader: Any, index: int, count: int, *, even: bool, name: str, what: str
    ) -> Any:
        """Return a loader that reads one rank's part of the data.

        A loader that splits its data itself is returned unchanged.

        Args:
            loader: the user's loader.
            index: the index of the part.
            count: the number of parts.
            even: if True, repeat samples until all parts have the same length.
            name: the loader's name in errors.
            what: "train", "validation", "test" or "predict".
        """
        from stratagem.data.sharding import shard_loader

        return shard_loader(loader, index, count, even=even, name=name)

    def make_batch_feed(
        self, step: Callable[..., Any], batches: Iterator[IndexedBatch], count: float, takes: int
    ) -> BatchFeed:
        """Return the feed that passes batches to an evaluation step.

        Args:
            step: the Module's method, such as `validation_step`.
            batches: the batches of all loaders.
            count: the number of batches; infinity if unknown.
            takes: the number of arguments that the step takes, of (batch, batch_idx,
                dataloader_idx).
        """
        from stratagem.trainer.step.batches import BatchFeed, refuse_dataloader_iter

        refuse_dataloader_iter(step)
        return BatchFeed(batches, takes)

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to this process. A copy keeps only the model, and may begin another run.
        return {**self.__dict__, "_run": None, "_opened": None, "_remote_model": self.model}
