"""Trainer: fit, validate, test and predict with any strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.ranks import Ranks
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.rank import leave_unprinted
from stratagem.loggers import Logger
from stratagem.module.datamodule import DataModule
from stratagem.module.module import Module
from stratagem.plan.plan import RunPlan
from stratagem.runtime.checkpoint_writer import CheckpointWriter
from stratagem.runtime.request import Devices, Plugin, as_list
from stratagem.runtime.runtime import REQUESTED, Runtime
from stratagem.storage import paths
from stratagem.trainer import folders, remote_result as elsewhere
from stratagem.trainer.attributes import TrainerAttributes
from stratagem.trainer.checks import (
    check_divergence_detection,
    check_module,
    check_not_running,
    say_what_begins_again,
)
from stratagem.trainer.defaults import (
    make_callbacks,
    make_loggers,
    make_profiler,
    merge_callbacks,
    parse_arguments,
)
from stratagem.trainer.job import Job
from stratagem.trainer.metrics.metrics import LatestValues
from stratagem.trainer.options import TrainerOptions
from stratagem.trainer.progress import Progress, RunState
from stratagem.trainer.results import print_values

if TYPE_CHECKING:
    from stratagem.profilers import Profiler
    from stratagem.trainer.run import Run


class Trainer(TrainerAttributes):
    """Trains, validates, tests and predicts.

    Args:
        accelerator: a name, an Accelerator, or "auto".
        strategy: a name, a Strategy, or "auto".
        devices: how many, which, -1 for all, or "auto".
        num_nodes: machines taking part.
        precision: a name ("32-true", "bf16-mixed", ...), 64, 32, 16, "bf16", or a Precision.
        plugins: CheckpointIO, ClusterEnvironment, Launcher or Precision objects, or names of them.
        logger: a Logger or its name ("tensorboard", ...), several, False for none, or True for a
            CSVLogger.
        callbacks: a Callback or several.
        max_epochs: epochs to train; -1: no limit; None: 1000, unless max_steps or max_time is set.
        min_epochs, min_steps: train at least so long before `should_stop` counts.
        max_steps: optimizer steps to train; -1: no limit.
        max_time: time to train: a timedelta, "DD:HH:MM:SS", or seconds.
        fast_dev_run: run so many batches (True: one) of everything, without logger and checkpoints.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number
            of batches (int) or a fraction of them (float).
        val_check_interval: validate after so many batches (int), such a fraction of the epoch
            (float), or so much time (a timedelta, "DD:HH:MM:SS", or a dict of its arguments).
        check_val_every_n_epoch: validate in every n-th epoch; None: in any, with batches counted
            over epochs.
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
        compile: True: torch.compile of the model; "step": of the whole step; docs/compiling.md.
        detect_anomaly: check each loss and backward for NaN; slow.
        detect_divergence: compare step and parameters of the ranks after so many optimizer steps
            (True: 100).
        enable_checkpointing: add a ModelCheckpoint if there is none.
        async_save: write checkpoints while training goes on; needs memory of the host for a copy.
        enable_progress_bar: add a ProgressBar if there is none.
        enable_model_summary: add a ModelSummary if there is none: a table of the layers, on stderr.
        enable_autolog_hparams: give loggers the hyperparameters of the model and the DataModule
            when a run begins.
        overfit_batches: train on so many batches (int) or such a fraction of them (float), always
            the same and in order, and validate on as many; 0.0: on all.
        reload_dataloaders_every_n_epochs: ask for the loaders anew after so many epochs; 0: never.
        profiler: "simple", "advanced", "pytorch" or a Profiler; None: none, which costs nothing.
        barebones: turn off all that does not train, to measure it: checkpoints, loggers, values,
            bar, summary, sanity check, profiler.
        default_root_dir: where logs and checkpoints go; None: the current folder. At a URL,
            checkpoints without a `dirpath` go to its `checkpoints`, logs to the current folder.
        gpus, tpu_cores: shorthands, see `Lite`.

    Raises:
        ConfigurationError: the request cannot be met; nothing has been started.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1)
        >>> trainer.plan.strategy.name
        'single_device'
    """

    should_stop: bool = False
    """Set to True, on every rank alike, to end training after the present step."""
    _run: Run | None = None
    _tuned: Run | None = None
    """Of a Tuner, until the next run: it has the data as it was tuned, and was never executed."""
    _trained_elsewhere: Module | None = None
    """The model of the last run, where that was in processes of its own."""

    def __init__(
        self,
        *,
        accelerator: Accelerator | str = "auto",
        strategy: Strategy | str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Precision | str | int = "32-true",
        plugins: Plugin | Sequence[Plugin] | None = None,
        logger: bool | Logger | Sequence[Logger | str] | str | None = None,
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
        val_check_interval: int | float | str | timedelta | Mapping[str, int] | None = None,
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
        compile: bool | Literal["step"] | Mapping[str, Any] = False,
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
        barebones: bool = False,
        default_root_dir: str | Path | None = None,
        gpus: int | str | list[int] | None = None,
        tpu_cores: int | str | list[int] | None = None,
    ) -> None:
        given = parse_arguments(locals(), Trainer.__init__)
        vars(self).update(vars(TrainerOptions.parse(given)))
        requested = {name: given[name] for name in REQUESTED}
        self.runtime = Runtime(step_options=self.step_options, **requested)
        check_divergence_detection(self.plan, self.detect_divergence)
        quick = self.fast_dev_run > 0
        self.loggers = make_loggers(given["logger"], self.default_root_dir, quick=quick)
        self._profiler = make_profiler(given["profiler"])
        self.callbacks = make_callbacks(given, quick=quick)
        self._state, self._progress = RunState(), Progress()
        self._latest = LatestValues()

    # -- what runs where

    @property
    def plan(self) -> RunPlan:
        """What was chosen, and why; `trainer.plan.explain()` is its text."""
        return self.runtime.plan

    @property
    def strategy(self) -> Strategy:
        """The strategy; its device is there once processes are launched."""
        return self.runtime.strategy

    @property
    def ranks(self) -> Ranks:
        """The processes that train together; collectives work once they are launched."""
        return self.runtime.ranks

    @property
    def checkpoint_writer(self) -> CheckpointWriter:
        """What saves and loads checkpoints from all ranks together."""
        return self.runtime.checkpoint_writer

    @property
    def run(self) -> Run:
        """The present run, or the one before; for callbacks that follow it closely.

        Raises:
            ConfigurationError: there was none.
        """
        if self._run is not None:
            return self._run
        if self._trained_elsewhere is not None:
            raise ConfigurationError(
                f"the run was in processes of its own (launcher {self.plan.launcher.name!r}), of "
                "which only the model's weights, logged values and callbacks' states come back: "
                "read this in a callback or in the Module, or train with strategy='ddp' in a script"
            )
        raise ConfigurationError(
            "this needs a model that was fitted, validated, tested or predicted with this "
            "Trainer; there was none yet"
        )

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
            ConfigurationError: this Trainer is running already.
            UserCodeError: the model or a loader does not keep its contract.
            CheckpointError: the checkpoint cannot be used.
            RankFailedError: another rank failed.
        """
        self._execute(
            Job.of("fit", model, train_dataloaders, datamodule, ckpt_path, val_dataloaders)
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
            ckpt_path: weights to load before: a path or URL, "last" or "best".
            verbose: print the values.
        """
        job = Job.of("validate", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        return self._evaluate(job, verbose)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run testing; return the values, a dict for each loader. Arguments as in `validate`."""
        job = Job.of("test", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        return self._evaluate(job, verbose)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> Any:
        """Predict; return what `predict_step` returned, for this rank's part of the data.

        Args:
            model, dataloaders, datamodule, ckpt_path: as in `validate`.
            return_predictions: False drops them; callbacks see each. None: True.

        Returns:
            A list of batches, or a list of those for several loaders; None if they are dropped.
        """
        job = Job.of("predict", self._model_or_last(model), dataloaders, datamodule, ckpt_path)
        keeps = return_predictions is not False
        predictions = self._execute(replace(job, keeps_predictions=keeps))
        if not keeps:
            return None
        return predictions[0] if len(predictions) == 1 else predictions

    def _model_or_last(self, model: Module | None) -> Module:
        last = self._trained_elsewhere if self._run is None else self._run.module
        model = last if model is None else model
        if model is None:
            raise ConfigurationError(
                "there is no model: pass one, or fit one with this Trainer before"
            )
        return model

    def _evaluate(self, job: Job, verbose: bool) -> list[dict[str, float]]:
        values, of_loaders = self._execute(job)
        if verbose and self.is_global_zero:
            print_values(job.stage, values)
        return list(of_loaders)

    def _execute(self, job: Job) -> Any:
        """Launch, and run on every rank."""
        check_not_running(self._state, job.stage)
        check_module(job.model, job.stage, makes_optimizers=self.strategy.makes_optimizers)
        self._state = RunState(job.stage, "running", job.stage)
        try:
            folders.check_before_launch(self, self.runtime, job.stage)
            if self.plan.remote and not self.runtime.is_launched:
                result = self._execute_elsewhere(job)
            else:
                result = self.runtime.launch(self._run_on_rank, job)
        except BaseException as error:
            self._state.status = "interrupted"
            if isinstance(error, KeyboardInterrupt):
                leave_unprinted(error)  # in two lines, by the rank that shows it
            raise
        self._state = RunState("", "finished", job.stage)
        return result

    def _execute_elsewhere(self, job: Job) -> Any:
        """Run in new processes, then take over what comes back of rank 0's."""
        outcome = self.runtime.launch(self._run_and_report, job)
        if outcome is None:
            return None  # rank 0 has ended itself, by sys.exit()
        result = elsewhere.take_over(
            outcome, job.model, self, latest=self._latest, progress=self._progress
        )
        self._trained_elsewhere = job.model
        return result

    def _run_and_report(self, job: Job) -> dict[str, Any]:
        result = self._run_on_rank(job)
        return elsewhere.report(self.run, result)

    def _run_on_rank(self, job: Job) -> Any:
        job.model.trainer = self
        if job.datamodule is not None:
            job.datamodule.trainer = self
        if self._run is None or self._run.module is not job.model:
            asked = as_list(job.model.configure_callbacks())
            self.callbacks = merge_callbacks(self.callbacks, asked, quick=self.fast_dev_run > 0)
        if job.stage == "fit":
            say_what_begins_again(self._run, job)
            self.should_stop = False
            # A checkpoint, if one is given, says where to go on; otherwise every fit begins anew.
            self._progress = Progress()
            # A callback that waits for a value waits for one of this fit.
            self._latest = LatestValues()
        self._tuned = None
        # A quarter of what importing the Trainer would take, and only runs need it.
        from stratagem.trainer.run import Run

        self._run = Run(
            self, self.runtime, job, progress=self._progress, latest=self._latest, before=self._run
        )
        return self._run.execute()

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to this process; a copy has its model, and may begin another one.
        run = self._run
        model = self._trained_elsewhere if run is None else run.module
        return {**self.__dict__, "_run": None, "_tuned": None, "_trained_elsewhere": model}

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save the run as it is; every rank calls it, and returns once the file is durable.

        Within an optimizer step (`is_within_step`) there is no state to resume from exactly, so the
        file is there once the step is taken, before anything else happens; weights alone are saved
        at once.

        With `async_save=True` it returns once the state is copied.

        Raises:
            CheckpointContentError: something in it is not weights-only-safe data; says what.
        """
        self.run.save(paths.parse_user_path(filepath), weights_only=weights_only)
