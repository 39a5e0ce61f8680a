"""Trainer: with Lightning's defaults, attributes and second spellings of arguments."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from stratagem import callbacks as own, storage, trainer
from stratagem.checkpoint import find_all
from stratagem.data import CombinedLoader
from stratagem.errors import ConfigurationError, MissingPackageError, UserCodeError
from stratagem.launch import rank_zero_info, rank_zero_warn
from stratagem.loggers import Logger
from stratagem.profilers import Profiler
from stratagem.strategies import StepOptions
from stratagem.trainer import FitState, LatestMetrics, StepPolicy, make_step
from stratagem_extras.callbacks.gradient_accumulation import GradientAccumulationScheduler
from stratagem_extras.callbacks.prediction_writer import BasePredictionWriter
from stratagem_lightning.api.accelerators.connector import TrainerConnector
from stratagem_lightning.api.callbacks.model_checkpoint import ModelCheckpoint
from stratagem_lightning.api.callbacks.rich_bar import RichProgressBar
from stratagem_lightning.api.core import advice, dataloader_iter
from stratagem_lightning.api.core.connectors import PARTS, CallbackConnector
from stratagem_lightning.api.core.loops import (
    EvaluationLoop,
    FitLoop,
    PredictionLoop,
    refuse_own_loop,
)
from stratagem_lightning.api.core.numbers import (
    FinishedFitState,
    ask_for_iterator,
    cast_each_time,
    in_order_of_distributed_sampler,
    reset_seed,
    seed_workers_once,
    shard_for_one_rank,
)
from stratagem_lightning.api.core.overrides import check_dataloader_idx, refuse_uncalled_overrides
from stratagem_lightning.api.core.shorthands import expand_shorthands, replace_half_on_cpu
from stratagem_lightning.api.core.states import TrainerState
from stratagem_lightning.api.core.steps import FitStep
from stratagem_lightning.api.instance_check import Shown
from stratagem_lightning.api.loggers import CSVLogger, DummyLogger, TensorBoardLogger
from stratagem_lightning.api.plugins.layer_sync import expand_layer_sync
from stratagem_lightning.api.strategies.called import call_at_load
from stratagem_lightning.api.strategies.single_device import belongs_to
from stratagem_lightning.api.utilities.data import weight_of
from stratagem_lightning.api.utilities.phrases import in_lightnings_words
from stratagem_lightning.api.utilities.version import LIGHTNING_VERSION
from stratagem_lightning_plugin.checkpoint_format import MARK, loops_of

if TYPE_CHECKING:
    from stratagem.trainer import BatchFeed, Job, Run, Step, StepContext

_OWN_DEFAULTS = ("logger", "log_every_n_steps", "enable_model_summary")
"""Arguments whose defaults are Lightning's where None is given."""

_SECOND_SPELLINGS: Mapping[str, tuple[Any, Any]] = {
    "barebones": (bool, False),
    "gpus": (int | str | list[int] | None, None),
    "tpu_cores": (int | str | list[int] | None, None),
}
"""Arguments that only Lightning has: their types and defaults."""
_BAREBONES = {
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "detect_anomaly": False,
    "profiler": None,
    "log_every_n_steps": 0,
}
"""The options that `barebones` sets."""


class _Option:
    """One of `Trainer.options` as an attribute of the Trainer, which scripts read and set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type) -> Any:
        if of is None:
            return self
        own = vars(of)
        return getattr(own["options"], self._name) if "options" in own else own[self._name]

    def __set__(self, of: Any, value: Any) -> None:
        if "options" in vars(of):
            of.options = replace(of.options, **{self._name: value})
        else:
            # A subclass, before it calls `__init__`, which has the last word.
            vars(of)[self._name] = value


class _MaxEpochs(_Option):
    """`max_epochs`, which is None until the first fit if it was not passed, as in Lightning."""

    def __get__(self, of: Any, owner: type) -> Any:
        is_open = of is not None and vars(of).get("_max_epochs_is_open")
        return None if is_open else super().__get__(of, owner)

    def __set__(self, of: Any, value: Any) -> None:
        vars(of)["_max_epochs_is_open"] = False
        super().__set__(of, value)


_POLICY = StepPolicy(
    counts_each_loss=True,
    divides_by_window=True,
    clears_before_backward=True,
    divides_loss_in_hooks=True,
    schedulers_count_batches=True,
    validates_at_stop=True,
    draws_at_reload=True,
    weighs_losses=False,
    hints_at_log_interval=False,
)


def _taking_arguments_of(base: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show the signature of whom the arguments are handed on to, for command lines."""
    taken = inspect.signature(base.__init__)  # type: ignore[misc]
    # Not as text, which only its own module can evaluate.
    types = get_type_hints(base.__init__, localns={"Profiler": Profiler})  # type: ignore[misc]
    types |= {name: kind for name, (kind, _) in _SECOND_SPELLINGS.items()}
    parameters = [
        one.replace(
            annotation=types.get(name, one.annotation),
            default=None if name in _OWN_DEFAULTS else one.default,
        )
        for name, one in taken.parameters.items()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in _SECOND_SPELLINGS.items()
    ]

    def show(init: Callable[..., None]) -> Callable[..., None]:
        init.__signature__ = taken.replace(parameters=parameters)  # type: ignore[attr-defined]
        init.__annotations__ = types
        return init

    return show


class Trainer(trainer.Trainer):
    """A Trainer that logs as Lightning's does: into `lightning_logs`, every 50 steps.

    Args:
        logger: None or True: a TensorBoardLogger in the folder `lightning_logs`, or a CSVLogger if
            TensorBoard is not installed; otherwise as in `stratagem.Trainer`.
        log_every_n_steps: None: 50.
        enable_model_summary: None: print the table of layers, except in a quick run.
        barebones: disable all features besides training, to measure overhead: checkpoints, loggers,
            values, bar, summary, sanity check, profiler.
        gpus, tpu_cores: short for `accelerator="gpu"` or "tpu" and `devices`.
        model_registry: unsupported: expected None.
        **options: the arguments of `stratagem.Trainer`.

    Missing arguments are read from the environment, from PL_TRAINER_MAX_STEPS for `max_steps`.

    Raises:
        ConfigurationError: the request cannot be met; no process has been started.

    Example:
        >>> from stratagem_lightning.api.trainer import Trainer
        >>> Trainer(accelerator="cpu").log_every_n_steps
        50
    """

    barebones: bool

    @property
    def policy(self) -> StepPolicy:  # type: ignore[override]
        """The conventions of Lightning's loop.

        Torch draws a number for each iterator, and hooks may draw others. So iterators are made
        before the hooks that start a loop. But a prediction writer notes from its hook on which
        samples are read.
        """
        writes = any(isinstance(callback, BasePredictionWriter) for callback in self.callbacks)
        reads = not (writes and super().state.stage == "predict")
        return replace(_POLICY, reads_before_hooks=reads)

    @_taking_arguments_of(trainer.Trainer)
    @in_lightnings_words
    def __init__(self, **options: Any) -> None:
        self._loops: dict[str, EvaluationLoop] = {}
        self._callback_connector = CallbackConnector(self)
        passed = {n: v for n, v in options.items() if v is not None or n not in _OWN_DEFAULTS}
        options = expand_layer_sync(expand_shorthands({**_of_environment(), **passed}))
        options = replace_half_on_cpu(options)
        self.barebones = bool(options.pop("barebones", False))
        if self.barebones:
            options = _of_barebones(options)
        logger, log_every_n_steps, enable_model_summary = (
            options.pop(name, None) for name in _OWN_DEFAULTS
        )
        model_registry = options.pop("model_registry", None)
        if model_registry is not None:
            raise ConfigurationError(
                f"model_registry={model_registry!r} is a service of Lightning's: leave it out"
            )
        plain = not self.barebones
        quick = bool(options.get("fast_dev_run"))
        if plain and not quick and logger in (None, True):
            logger = _default_logger(options.get("default_root_dir"))
        if log_every_n_steps is None and plain:
            log_every_n_steps = 50
        if enable_model_summary is None and plain:
            enable_model_summary = not quick
        if plain:
            options["callbacks"] = self._with_defaults(options)
        super().__init__(
            logger=logger,
            log_every_n_steps=log_every_n_steps,
            enable_model_summary=enable_model_summary,
            **options,
        )
        # `make_sharded_loader` gets all loaders, also the undivided ones.
        self._divides_data = self.options.use_distributed_sampler
        self.options = replace(self.options, use_distributed_sampler=True)
        if quick and plain and logger not in (False, []):
            self.loggers = [DummyLogger()]
        belongs_to(self.strategy, self)
        _say_what_one_means(options)
        self._arguments = options
        self._max_epochs_is_open = options.get("max_epochs") is None and not quick
        self._fit_step: Step | None = None
        self._asks: list[Callable[[], object]] = []
        """What is left to do after a fit's sanity check."""
        self._verbose = True
        """Whether the last validation or test prints its values."""
        self._is_past_epoch = False
        """Whether the last fit ended within an epoch, which counts as a whole one then."""
        self._last_batch_idx = -1
        """The index of the last fit's last batch in its epoch."""
        self._ended_early = False
        """Whether `on_train_batch_start` ended the last fit's last epoch."""

    def _with_defaults(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the callbacks, with those that a user's own connector adds."""
        connector = self._callback_connector
        if type(connector) is CallbackConnector:
            return _with_defaults(options)
        given = options.get("callbacks")
        self.callbacks = [given] if isinstance(given, own.Callback) else list(given or ())
        for argument, add in (
            ("enable_checkpointing", connector._configure_checkpoint_callbacks),
            ("enable_progress_bar", connector._configure_progress_bar),
        ):
            add(options.get(argument) in (None, True))
        return self.callbacks

    # -- the four runs

    @in_lightnings_words
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a model; as `stratagem.Trainer.fit`.

        Args:
            model, train_dataloaders, val_dataloaders, datamodule: see `stratagem.Trainer.fit`.
            ckpt_path: as in `stratagem.Trainer.fit`; "last" without a saved checkpoint starts from
                the beginning, with a warning.
            weights_only: ignored: loading never executes code from a checkpoint.
        """
        path = self._last_if_there(ckpt_path, "fit")
        self._begin(model, datamodule)
        for callback in self.callbacks:
            if isinstance(callback, own.ModelSummary):
                callback.keeps_rng_state = False
                callback.reads_of_example = 3
        self._max_epochs_is_open = self._is_past_epoch = False
        with self._exiting_on_interrupt():
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, path)
        self._is_past_epoch = self.fit_state.batches > 0 and not self.fit_state.epoch_is_done

    @in_lightnings_words
    def validate(  # type: ignore[override]  # in Lightning's order
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run validation; as `stratagem.Trainer.validate`, except for a missing model.

        Args:
            model: None for the fitted model, with its best weights if a callback saved them.
            dataloaders, ckpt_path, verbose, datamodule: see `stratagem.Trainer.validate`.
            weights_only: ignored: loading never executes code from a checkpoint.
        """
        path = self._best_if_left_out(model, ckpt_path, "validate")
        self._begin(model, datamodule)
        self._verbose, printed = verbose, verbose and "validate" not in self._loops
        with self._exiting_on_interrupt():
            values = super().validate(model, dataloaders, datamodule, path, printed)
        return self._logged(values, "validate", verbose)

    @in_lightnings_words
    def test(  # type: ignore[override]  # in Lightning's order
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run testing. Arguments as in `validate`."""
        path = self._best_if_left_out(model, ckpt_path, "test")
        self._begin(model, datamodule)
        self._verbose, printed = verbose, verbose and "test" not in self._loops
        with self._exiting_on_interrupt():
            values = super().test(model, dataloaders, datamodule, path, printed)
        return self._logged(values, "test", verbose)

    @in_lightnings_words
    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Predict; as `stratagem.Trainer.predict`, with `model` and `ckpt_path` of `validate`."""
        if model is not None and getattr(model, "predict_step", model) is None:
            raise UserCodeError(
                f"`predict_step` cannot be None to run `Trainer.predict`: define it in "
                f"{type(model).__name__}, or leave the attribute alone"
            )
        if model is not None and getattr(model, "forward", model) is None:
            raise UserCodeError(
                f"`Trainer.predict` requires `forward` method to run: define it in "
                f"{type(model).__name__}, or leave the attribute alone"
            )
        path = self._best_if_left_out(model, ckpt_path, "predict")
        self._begin(model, datamodule)
        with self._exiting_on_interrupt():
            return super().predict(model, dataloaders, datamodule, return_predictions, path)

    @contextmanager
    def _exiting_on_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C end a script by SystemExit, as Lightning does; not a notebook.

        Raises:
            SystemExit: with the code 1, in the place of a KeyboardInterrupt.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if self.plan.request.interactive:
                raise
            raise SystemExit(1) from interrupt

    @in_lightnings_words
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Save a checkpoint; as `stratagem.Trainer.save_checkpoint`."""
        super().save_checkpoint(*args, **options)

    def begin_run(self, job: Job) -> tuple[FitState, LatestMetrics]:
        """Return the state of the next run, whose values are weighted as Lightning weights them.

        What was logged in the run before is forgotten.
        """
        cast_each_time(self.strategy)
        call_at_load(self.strategy)
        self._asks.clear()
        if job.stage == "fit":
            advice.warn_of_validation(job)
            advice.warn_of_default_epochs(self._arguments)
        state, latest = FitState(), LatestMetrics()
        if job.stage != "fit":
            state = FinishedFitState(**vars(self.fit_state))
        latest.batch_size = weight_of
        return state, latest

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entries that scripts read: Lightning's version, and the loops' progress."""
        checkpoint[MARK] = LIGHTNING_VERSION
        checkpoint["loops"] = loops_of(self.fit_state.state_dict())

    def _begin(self, model: Any, datamodule: Any) -> None:
        """Do what Lightning does at the start of a run, and refuse what it alone would call."""
        own = [self, self.strategy, *self.callbacks, *self.loggers, *self._loops.values()]
        refuse_uncalled_overrides([*own, model, datamodule])
        reset_seed(self.strategy)

    def make_train_step(self, context: StepContext) -> Step:
        """Return the step of a fit, which counts and weights batches as Lightning does.

        Also of one whose `training_step` takes `dataloader_iter`.
        """
        while self._asks:
            self._asks.pop(0)()
        _check_resumed_epoch(self.run)
        advice.warn_of_eval_mode(context)
        advice.warn_of_log_interval(context)
        advice.warn_of_workers_that_start_again(context)
        advice.warn_of_unused_schedules(context)
        if dataloader_iter.takes_dataloader_iter(context.module.training_step):
            self._fit_step = dataloader_iter.ReadingStep(context)
        else:
            self._fit_step = make_step(context, FitStep)
        return self._fit_step

    def make_sharded_loader(
        self, loader: Any, index: int, count: int, *, even: bool, name: str, what: str
    ) -> Any:
        """Return a loader that reads one rank's part of the data, in Lightning's order."""
        advice.warn_of_loader(loader, what)
        # The latest run is None while a Tuner opens the data.
        left = None if self.latest_run is None else ask_for_iterator(loader, what, self.latest_run)
        if left is not None:
            self._asks.append(left)
        loader = seed_workers_once(loader, self.global_rank)
        if not self._divides_data:
            return loader
        sharded = super().make_sharded_loader(loader, index, count, even=even, name=name, what=what)
        if count == 1:
            sharded = shard_for_one_rank(sharded, self.strategy)
        return in_order_of_distributed_sampler(
            sharded, what, shuffles=not self.options.overfit_batches
        )

    def make_batch_feed(
        self,
        step: Callable[..., Any],
        batches: Iterator[tuple[Any, int, int]],
        count: float,
        takes: int,
    ) -> BatchFeed:
        """Return the feed of batches to a step, also to a step that takes `dataloader_iter`.

        Raises:
            UserRuntimeError: the step or a hook of an evaluation cannot tell its loaders apart.
        """
        what = self.run.evaluation.what
        if what:
            check_dataloader_idx(self.run.module, what, len(self.run.evaluation_loaders[what]))
        if dataloader_iter.takes_dataloader_iter(step):
            return dataloader_iter.IterFeed(dataloader_iter.DataLoaderIter(batches, count))
        return super().make_batch_feed(step, batches, count, takes)

    def run_on_rank(self, job: Job, *, reports: bool = False) -> Any:
        """Run; then note where the last batch of a fit was."""
        try:
            return super().run_on_rank(job, reports=reports)
        finally:
            if self._fit_step is not None:
                step = self._fit_step
                # A batch that ended the epoch at its start is the last one, too.
                self._ended_early = step.begun == 0 and step.batch_idx > 0
                self._last_batch_idx = step.last_batch_idx + self._ended_early
                # It holds the graph of the last loss.
                self._fit_step = None

    def _logged(
        self, results: list[dict[str, float]], stage: str, verbose: bool
    ) -> list[dict[str, float]]:
        """Return of the values of each loader those that loggers are given, as Lightning does.

        A loop of the user's prints them.
        """
        names = self.latest_metrics.for_loggers
        logged = [{n: value for n, value in one.items() if n in names} for one in results]
        if verbose and self.is_global_zero and stage in self._loops:
            tensors = [{n: torch.tensor(value) for n, value in one.items()} for one in logged]
            self._loops[stage]._print_results(tensors, stage)
        return logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar."""
        return {name: float(value) for name, value in self.latest_metrics.bar.items()}

    def _last_if_there(self, ckpt_path: str | Path | None, what: str) -> str | Path | None:
        """Return what to load, None in the place of "last" as long as nothing is saved."""
        if ckpt_path != "last" or self._has_saved():
            return ckpt_path
        rank_zero_warn(
            f"{what}(ckpt_path='last'): nothing is saved yet in the ModelCheckpoints' folders, so "
            "that no checkpoint is loaded"
        )
        return None

    def _best_if_left_out(
        self, model: Any, ckpt_path: str | Path | None, what: str
    ) -> str | Path | None:
        """Return "best" where neither model nor checkpoint is named, as Lightning has it."""
        ckpt_path = self._last_if_there(ckpt_path, what)
        saved = any(saver.best_model_path for saver in self.checkpoint_callbacks)
        if model is not None or ckpt_path is not None or not saved:
            return ckpt_path
        rank_zero_warn(
            "without a model and a ckpt_path the best weights that fit has saved are taken; pass "
            "the model to take its present ones"
        )
        return "best"

    def _has_saved(self) -> bool:
        """Whether a ModelCheckpoint has something to go on from."""
        savers = self.checkpoint_callbacks
        alone = self.default_root_dir if not self.loggers else None
        folders = [
            saver.dirpath or (None if alone is None else storage.join(alone, "checkpoints"))
            for saver in savers
        ]
        there = list(find_all(folder for folder in folders if folder is not None))
        return bool(there) or any(saver.kept_paths for saver in savers)

    # -- views of its parts, its state and of loops

    @property
    def train_dataloader(self) -> Any:
        """This rank's loader for training; of several, the list or dict of them."""
        loader = super().train_dataloader
        return loader.iterables if isinstance(loader, CombinedLoader) else loader

    # -- its options

    max_epochs = _MaxEpochs()
    min_epochs = _Option()
    max_steps = _Option()
    min_steps = _Option()
    max_time = _Option()
    limit_train_batches = _Option()
    limit_val_batches = _Option()
    limit_test_batches = _Option()
    limit_predict_batches = _Option()
    val_check_interval = _Option()
    check_val_every_n_epoch = _Option()
    num_sanity_val_steps = _Option()
    log_every_n_steps = _Option()
    deterministic = _Option()
    benchmark = _Option()
    inference_mode = _Option()
    detect_anomaly = _Option()
    enable_autolog_hparams = _Option()
    overfit_batches = _Option()
    reload_dataloaders_every_n_epochs = _Option()

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return super().logger

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def use_distributed_sampler(self) -> bool:  # type: ignore[override]  # read-only there too
        """Whether data is divided between ranks."""
        return self._divides_data

    @property
    def datamodule(self) -> Any:
        """The DataModule of the present or last run, or what was set here before one."""
        return super().datamodule or vars(self).get("_set_datamodule")

    @datamodule.setter
    def datamodule(self, datamodule: Any) -> None:
        vars(self)["_set_datamodule"] = datamodule

    @property
    def fast_dev_run(self) -> bool | int:
        """Batches of a quick run; True: one; False: it is none."""
        batches = self.options.fast_dev_run
        return bool(batches) if batches < 2 else batches

    @fast_dev_run.setter
    def fast_dev_run(self, batches: bool | int) -> None:
        self.options = replace(self.options, fast_dev_run=int(batches))

    @property
    def default_root_dir(self) -> str:
        """The folder for logs and checkpoints as text, which scripts add to."""
        return str(self.options.default_root_dir)

    @default_root_dir.setter
    def default_root_dir(self, folder: Any) -> None:
        self.options = replace(self.options, default_root_dir=folder)

    @property
    def step_options(self) -> StepOptions:
        """How optimizer steps are taken."""
        return self.options.step_options

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps of the whole fit; infinity without a limit.

        As in Lightning, a GradientAccumulationScheduler does not change it.
        """
        options, batches = self.options, self.num_training_batches
        schedules = any(isinstance(one, GradientAccumulationScheduler) for one in self.callbacks)
        if not schedules or options.max_epochs == -1 or batches == float("inf"):
            return super().estimated_stepping_batches
        steps = int(batches) * max(options.max_epochs, 1)
        return steps if options.max_steps == -1 else min(steps, options.max_steps)

    # -- its parts

    @property
    def lightning_module(self) -> Any:
        """The model of the present run, or of the last one."""
        return self.model

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            return PARTS[name](self)
        return super().__getattr__(name)  # type: ignore[misc]  # hidden from type checkers

    @property
    def scaler(self) -> Any:
        """The scaler of the loss under `precision="16-mixed"`.

        None: another precision.
        """
        return getattr(self.strategy.precision, "scaler", None)

    @Shown
    def _evaluation_loop(self) -> EvaluationLoop:
        """The loop of the present evaluation; within a fit that of its validation."""
        loops = {"validate": self.validate_loop, "test": self.test_loop}
        return loops.get(str(self.state.fn)) or self.fit_loop.epoch_loop.val_loop

    @Shown
    def _active_loop(self) -> Any:
        """The loop of the present run; None: there is no run."""
        if self.state.fn == "fit":
            return self._evaluation_loop if self.validating else self.fit_loop
        return (
            self.predict_loop
            if self.state.fn == "predict"
            else (self._evaluation_loop if self.state.fn else None)
        )

    @property
    def _accelerator_connector(self) -> TrainerConnector:
        return TrainerConnector(self)

    # -- its state

    @property
    def current_epoch(self) -> int:
        """The epoch, counted from 0; after a fit, the number of epochs that it has begun."""
        return self.fit_state.epoch + self._is_past_epoch

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the present run has loaded, or the last one; the request before."""
        run = self.latest_run
        if run is None:
            return None
        path = run.resume_point.path or run.job.ckpt_path
        if path is not None and run.job.ckpt_path == "last" and not storage.is_url(path):
            # Show the link, if one exists, as Lightning does.
            link = Path(path).parent / f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}.ckpt"
            path = link if link.is_symlink() and link.resolve() == Path(path).resolve() else path
        return None if path is None else str(path)

    @property
    def training(self) -> bool:
        """Whether a fit is running, and no validation or sanity check within it."""
        return super().state.stage == "fit" and not self.evaluating

    @property
    def validating(self) -> bool:
        """Whether validation is running, also within a fit; False in the sanity check."""
        return self._is_running("validation") and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self._is_running("test")

    @property
    def predicting(self) -> bool:
        """Whether predicting is running."""
        return self._is_running("predict")

    def _is_running(self, what: str) -> bool:
        return self.latest_run is not None and self.latest_run.evaluation.what == what

    @property
    def evaluating(self) -> bool:
        """Whether validation, the sanity check or a test is running."""
        return self.sanity_checking or self.validating or self.testing

    @property
    def is_last_batch(self) -> bool:
        """Whether the present training batch is the last of its epoch, as far as known."""
        if self.latest_run is None or self.latest_run.stage != "fit":
            return False
        ended_early = self.latest_run.step is None and self._ended_early
        return ended_early or self.fit_loop.batch_idx + 1 >= self.num_training_batches

    @property
    def batches_that_trained(self) -> int:
        """The number of batches of this epoch that were trained on."""
        return self.fit_state.batches

    # -- its data

    @property
    def state(self) -> TrainerState:  # type: ignore[override]  # the same in Lightning's enumerations
        """The state of this Trainer."""
        return TrainerState(self, super().state)

    @property
    def fit_loop(self) -> FitLoop:
        """The limits and the progress of a fit."""
        return FitLoop(self)

    @fit_loop.setter
    def fit_loop(self, loop: Any) -> None:
        refuse_own_loop(loop)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The progress of a validation."""
        return self._loops.get("validate") or EvaluationLoop(self)

    @validate_loop.setter
    def validate_loop(self, loop: EvaluationLoop) -> None:
        self._loops["validate"] = loop

    @property
    def test_loop(self) -> EvaluationLoop:
        """The progress of a test."""
        return self._loops.get("test") or EvaluationLoop(self)

    @test_loop.setter
    def test_loop(self, loop: EvaluationLoop) -> None:
        self._loops["test"] = loop

    @property
    def predict_loop(self) -> PredictionLoop:
        """The progress and the results of predicting."""
        return PredictionLoop(self)


def _check_resumed_epoch(run: Run) -> None:
    """Raise for a checkpoint of a later epoch than the limit of the fit.

    Raises:
        ConfigurationError: no epoch is left to train.
    """
    epoch, most = run.state.epoch + run.state.epoch_is_done, run.trainer.options.max_epochs
    if run.resume_point.path is not None and -1 < most < epoch:
        raise ConfigurationError(
            f"You restored a checkpoint with current_epoch={epoch}, but you have set "
            f"Trainer(max_epochs={most}): pass a larger max_epochs"
        )


def _default_logger(root: str | Path | None) -> Logger:
    """Return the default logger of Lightning.

    Args:
        root: `default_root_dir`; a URL is ignored.
    """
    folder = Path.cwd() if root is None or storage.is_url(root) else root
    try:
        return TensorBoardLogger(folder)
    except MissingPackageError:
        return CSVLogger(folder)


def _with_defaults(options: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks, with a ModelCheckpoint and a progress bar of Lightning's classes."""
    given = options.get("callbacks")
    callbacks = [given] if isinstance(given, own.Callback) else list(given or ())
    if _wants(options, "enable_checkpointing", callbacks, own.ModelCheckpoint):
        callbacks.append(ModelCheckpoint())
    if _wants(options, "enable_progress_bar", callbacks, own.ProgressBar):
        callbacks.insert(0, RichProgressBar())
    return callbacks


def _wants(
    options: Mapping[str, Any], argument: str, callbacks: list[Any], kind: type[own.Callback]
) -> bool:
    is_there = any(isinstance(callback, kind) for callback in callbacks)
    return options.get(argument) in (None, True) and not is_there


def _of_barebones(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without the options that `barebones` disables.

    Raises:
        ConfigurationError: the user requested a disabled feature.
    """
    for name, off in _BAREBONES.items():
        requested = options.get(name)
        if requested is not None and requested != off:
            raise ConfigurationError(
                "barebones=True turns off what does not train, and "
                f"`Trainer({name}={requested!r})` was passed: leave one of the two out"
            )
    return {**options, **_BAREBONES}


def _say_what_one_means(options: Mapping[str, Any]) -> None:
    """Say whether it is one batch or all of them, where 1 and 1.0 are easily mistaken."""
    limits = (*(f"limit_{what}_batches" for what in _LIMITED), "overfit_batches")
    for name in (*limits, "val_check_interval"):
        value = options.get(name)
        if value != 1 or not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        is_one = isinstance(value, int)
        means = "1 batch will be used" if is_one else "100% of the batches will be used"
        if name == "val_check_interval":
            when = "after every batch" if is_one else "at the end of the training epoch"
            means = f"validation will run {when}"
        other = "1.0 means the whole epoch" if is_one else "1 means a single batch"
        rank_zero_info(f"`Trainer({name}={value})` was configured so {means}; {other}")


_LIMITED = ("train", "val", "test", "predict")
_PREFIX = "PL_TRAINER_"


def _of_environment() -> dict[str, Any]:
    """Return the arguments that environment variables give, as Python reads them."""
    found: dict[str, Any] = {}
    for name, text in os.environ.items():
        if not name.startswith(_PREFIX):
            continue
        try:
            found[name.removeprefix(_PREFIX).lower()] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name.removeprefix(_PREFIX).lower()] = text
    return found
