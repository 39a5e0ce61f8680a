"""Run: one fit, validate, test or predict on this rank, and the objects that exist only for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer

from stratagem.callbacks.callback import LOGGED
from stratagem.callbacks.progress.report import unused_validation
from stratagem.discovery.absent import explain_missing
from stratagem.discovery.registry import nearest_of
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.user_names import show
from stratagem.launch.process import printable
from stratagem.launch.rank import show_raised_error, this_rank
from stratagem.runtime.optimizer import wrap_optimizer
from stratagem.runtime.prepare import prepare, release
from stratagem.storage import paths
from stratagem.trainer import checks
from stratagem.trainer.hooks import Hooks
from stratagem.trainer.loaders.loaders import EvaluationLoader
from stratagem.trainer.loaders.open import (
    FitData,
    open_evaluation_data,
    open_fit_data,
    reopen_training,
    reopen_validation,
)
from stratagem.trainer.loops import evaluation, fit as fit_loop
from stratagem.trainer.loops.interruption import Interruption
from stratagem.trainer.loops.validation import Validation
from stratagem.trainer.metrics.log_buffer import LogBuffer
from stratagem.trainer.metrics.metrics import LatestMetrics, Metrics
from stratagem.trainer.options import set_determinism
from stratagem.trainer.profiling import Profiling
from stratagem.trainer.progress import EvaluationProgress, Progress
from stratagem.trainer.resume.checkpoint import (
    Weights,
    collect_checkpoint,
    collect_weights,
    read_checkpoint,
    restore_model,
    restore_training,
)
from stratagem.trainer.resume.find import ResumePoint, find_resume_point, newest_checkpoint
from stratagem.trainer.step.hooked_step import check_closure, check_step_hooks
from stratagem.trainer.step.optimizers import configure, count_steps
from stratagem.trainer.step.schedulers import Schedulers

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.runtime.runtime import Runtime
    from stratagem.trainer.job import Job
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.resume.rank_state import RankState
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer

_EVALUATED = {"fit": "validation", "validate": "validation", "test": "test", "predict": "predict"}


class Run:
    """One run of a Trainer on this rank.

    Callbacks that need more than the Trainer's attributes can read the run as `trainer.run`. Only
    this class writes its fields.

    Args:
        trainer: the Trainer, which holds the options and the callbacks.
        runtime: the Runtime, whose strategy runs the plan.
        job: the request.
        progress: the training progress of the Trainer's last fit.
        latest: the latest logged values since the start of the Trainer's last fit.
        before: the previous run. If it had the same model, its prepared model is used again.
    """

    def __init__(
        self,
        trainer: Trainer,
        runtime: Runtime,
        job: Job,
        *,
        progress: Progress,
        latest: LatestMetrics,
        before: Run | None,
    ) -> None:
        self.trainer = trainer
        self.runtime = runtime
        self.job = job
        self.stage = job.stage
        self.module = job.model
        self.datamodule = job.datamodule
        self.strategy = runtime.strategy
        self.progress = progress
        self.latest = latest
        self.latest.bar.clear()
        self.profiling = Profiling(trainer._profiler, type(self.strategy).__name__)
        self.callbacks = [*trainer.callbacks, *checks.hints_of_run(trainer)]
        self.hooks: Hooks = Hooks(trainer, job.model, self.callbacks, self.profiling.wrap)
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self.rows = LogBuffer(loggers, self.strategy.accelerator)
        self.metrics: Metrics = Metrics(
            self.strategy,
            self.rows,
            latest,
            every_n_steps=trainer.options.log_every_n_steps,
            module=job.model,
        )
        """The object that receives the values of `log` in training."""
        self.prepared: PreparedModel | None = None
        self.optimizers: list[Any] = []
        """The optimizers for user code; their steps go through the strategy."""
        self.schedulers: Schedulers = Schedulers(self.progress, self.metric, job.model)
        self._former_rank_state: RankState | None = None
        self.group = runtime.group
        if before is not None and before.module is job.model and before.group == self.group:
            self.prepared, self.optimizers = before.prepared, before.optimizers
            self.schedulers.configs = before.schedulers.configs
            self._former_rank_state = before.rank_state
        elif before is not None and before.prepared is not None:
            release(before.module, before.prepared)
        self.resume_point = ResumePoint()
        """The checkpoint that this run loads, if any, and the identity of a fit."""
        self.fit_data: FitData | None = None
        """In a fit: this rank's data."""
        self.evaluation_loaders: dict[str, list[EvaluationLoader]] = {}
        """This rank's loaders, by "validation", "test" or "predict"."""
        self.evaluation = EvaluationProgress()
        self.validation = Validation(self)
        """In a fit: the validation loop."""
        self.step: Step | None = None
        """In a fit: the optimizer step, which may have begun."""
        self.deferred_saves: list[paths.Location] = []
        """The checkpoints to save after the current optimizer step."""
        self.has_ended_epoch = False
        """In a fit: whether an epoch has ended, so that its metrics are available."""
        self.logged_in_epoch: set[str] = set()
        """In a fit: the names that training has logged in the epoch that ended last."""
        self.has_failed = False
        self.interruption = Interruption(
            self.strategy.ranks, self.strategy.cluster_environment, trainer.options.max_time
        )

    def execute(self) -> Any:
        """Set up, run the stage, and tear down."""
        trainer, module, datamodule, stage = self.trainer, self.module, self.datamodule, self.stage
        stages: dict[str, Callable[[], Any]] = {
            "fit": self._fit,
            "validate": self._evaluate,
            "test": self._evaluate,
            "predict": self._predict,
        }
        status = "failed"
        ranks = self.strategy.ranks
        ranks.report_status(self._position)
        checks.check_folders_on_ranks(trainer, stage)
        restore_determinism = set_determinism(self.strategy.accelerator, trainer.options)
        self.profiling.begin(self)
        before = LOGGED.set(ref(module))
        try:
            # First, because callbacks read the loggers' folder, which a resumed run keeps.
            self.resume_point = find_resume_point(trainer, self.job)
            self.job.prepare_data(ranks)
            if datamodule is not None:
                datamodule.setup(stage)
            release_finished_engines(self)
            self.strategy.setup(trainer)
            self.hooks.call("setup", stage)
            with self.runtime.init_module():
                module.configure_model()
            with fit_loop.anomaly_detection(trainer.options.detect_anomaly):
                result = stages[stage]()
            self.hooks.call("teardown", stage)
            if datamodule is not None:
                datamodule.teardown(stage)
            status = "success"
            return result
        except BaseException as error:
            self.has_failed = True
            self._end_failed(error)
            raise
        finally:
            restore_determinism()
            LOGGED.reset(before)
            # The step holds the graph of the last loss, and so the objects of an engine's hooks.
            self.step = None
            # The values from before an error help to explain it.
            self.rows.flush()
            self.profiling.end(self)
            if ranks.is_global_zero:
                for logger in trainer.loggers:
                    if stage == "fit":
                        logger.steps_taken = self.progress.global_step
                    self.rows.attempt(logger, partial(logger.finalize, status))
            if self.has_failed and self.interruption.is_pending:
                show_raised_error()  # the signal may end the process at once
            self.interruption.finish()

    def _position(self) -> str:
        if self.stage != "fit":
            return f"{self.stage}, batch {self.evaluation.batches}"
        return f"fit, epoch {self.progress.epoch}, step {self.progress.global_step}"

    def _end_failed(self, error: BaseException) -> None:
        """Explain an error, call the hooks for it, and keep earlier values and checkpoints.

        The caller raises the error. Further errors are only printed here, so that they do not hide
        it.
        """
        optimizers = () if self.prepared is None else self.prepared.optimizers
        from stratagem.runtime.device_errors import explain_device_error  # after failures only

        explain_device_error(error, self.strategy, self.module, optimizers)
        if isinstance(error, AttributeError):
            explain_missing(error, self.module)
        if this_rank.device_is_lost:
            self.rows.drop_device_values()
        of_data = () if self.datamodule is None else (self.datamodule.on_exception,)
        for hook in (*self.hooks.of("on_exception"), *of_data):
            _print_errors(hook, error)
        # Checkpoints that were saved before the error become durable.
        _print_errors(self.strategy.checkpoint_io.wait_at_error)
        if isinstance(error, KeyboardInterrupt) and self.strategy.ranks.is_global_zero:
            print(printable(self._interrupted(), sys.stderr.encoding), file=sys.stderr, flush=True)

    def _interrupted(self) -> str:
        """Return two lines of text: where Ctrl-C ended this run, and how to resume it."""
        if self.stage != "fit":
            number = self.evaluation.batches
            batches = f"{number} batch" if number == 1 else f"{number} batches"
            return f"\nstratagem: {self.stage} was interrupted, after {batches}"
        saved = newest_checkpoint(self.trainer)
        follows = "there is no checkpoint yet"
        if saved:
            follows = f"trainer.fit(..., ckpt_path={saved!r}) resumes the run"
        return (
            f"\nstratagem: interrupted in epoch {self.progress.epoch}, after step "
            f"{self.progress.global_step}\nstratagem: {follows}"
        )

    # -- the stages

    def _fit(self) -> None:
        trainer, module, strategy = self.trainer, self.module, self.strategy
        options = trainer.options
        checks.check_manual_optimization(module, trainer.plan, strategy, options.step_options)
        check_step_hooks(module, strategy, trainer.plan)
        checks.give_hints(strategy)
        data = self.open_fit_data()
        strategy.set_batch_size(data.loader.batch_size)
        checks.hint_at_log_interval(trainer, data.loader.batches)
        checks.hint_at_mistakes(self)
        prepared = self._prepare_to_train()
        path = self.resume_point.path
        if path is not None:
            self._restore(prepared, read_checkpoint(self.runtime.checkpoint_writer, path), path)
        joined = strategy.adopt_peer_state(prepared, self.checkpoint)
        if joined is not None:
            self._restore(prepared, joined, "the run that this one joins")
        checks.log_hyperparameters(self)
        if strategy.ranks.is_global_zero:
            for logger in trainer.loggers:
                logger.log_graph(module)
        with module.logging_to(self.metrics):
            self.hooks.call("on_fit_start")
            self.interruption.begin()
            if path is None and joined is None:
                self.validation.check_sanity(prepared)
            with ExitStack() as stack:
                stack.callback(self._close_data)
                self.step = trainer.make_train_step(self, prepared)
                fit_loop.fit(self, prepared, self.step)
        self.hooks.call("on_fit_end")
        strategy.checkpoint_io.wait()

    def _prepare_to_train(self) -> PreparedModel:
        """Prepare the model and its optimizers with the strategy."""
        strategy = self.strategy
        prepared = self.prepared = prepare(strategy, self.module, self._make_optimizers)
        show(strategy, prepared)
        self.optimizers = [wrap_optimizer(o, prepared, strategy) for o in prepared.optimizers]
        if not self.module.automatic_optimization:
            for optimizer in self.optimizers:
                count_steps(optimizer, self.progress)
        return prepared

    def _make_optimizers(self) -> list[Optimizer]:
        if self.strategy.makes_optimizers and not self.module.defines("configure_optimizers"):
            self.schedulers.configs = []
            return []
        optimizers, self.schedulers.configs = configure(self.module)
        if self.module.automatic_optimization and optimizers:
            options = self.trainer.options.step_options
            check_closure(optimizers[0], self.strategy, self.runtime.plan, options)
        checks.check_parameters(optimizers, self.module)
        return optimizers

    def _evaluate(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Return the metrics of all loaders together, and the metrics of each loader."""
        loaders = self.open_evaluation_data()
        checks.log_hyperparameters(self)
        what = _EVALUATED[self.stage]
        epoch = evaluation.evaluate(self, self._prepare_to_evaluate(), loaders, what)
        values = {name: float(value) for name, value in epoch.values.items()}
        everywhere = range(len(loaders))
        return values, [
            {n: v for n, v in values.items() if index in epoch.loaders.get(n, everywhere)}
            for index in everywhere
        ]

    def _predict(self) -> list[list[Any]]:
        loaders = self.open_evaluation_data()
        return evaluation.predict(self, self._prepare_to_evaluate(), loaders)

    def _prepare_to_evaluate(self) -> PreparedModel:
        path = self.resume_point.path
        if self.prepared is None:
            self.prepared = prepare(self.strategy, self.module)
        show(self.strategy, self.prepared)
        if path is not None:
            checkpoint = read_checkpoint(self.runtime.checkpoint_writer, path)
            restore_model(self, self.prepared, checkpoint, path)
        return self.prepared

    # -- data

    def open_fit_data(self) -> FitData:
        """Create this rank's loaders for a fit."""
        return self._use_data(open_fit_data(self))

    def _use_data(self, data: FitData) -> FitData:
        self.fit_data = data
        self.evaluation_loaders["validation"] = data.validation
        return data

    def open_evaluation_data(self) -> list[EvaluationLoader]:
        """Create this rank's loaders for an evaluation."""
        what = _EVALUATED[self.stage]
        loaders = self.evaluation_loaders[what] = open_evaluation_data(self, what)
        return loaders

    def reopen_training(self) -> FitData:
        """Create the training loaders of a fit again."""
        self._close_data()
        return self._use_data(reopen_training(self))

    def reopen_validation(self) -> None:
        """Create the validation loaders of a fit again."""
        self._use_data(reopen_validation(self))

    def reopen_fit_data(self, epoch: int) -> FitData:
        """Create the loaders of a fit again, with `current_epoch` set to `epoch` meanwhile."""
        self._close_data()
        now, self.progress.epoch = self.progress.epoch, epoch
        try:
            return self.open_fit_data()
        finally:
            self.progress.epoch = now

    def _close_data(self) -> None:
        if self.fit_data is not None:
            self.fit_data.loader.close()

    @property
    def train_loader(self) -> TrainLoader | None:
        """In a fit: the training loader of this rank."""
        return None if self.fit_data is None else self.fit_data.loader

    @property
    def rank_state(self) -> RankState | None:
        """The RNG states and the position in the data of this rank's last fit."""
        return self._former_rank_state if self.fit_data is None else self.fit_data.rank_state

    # -- checkpoints

    @property
    def run_id(self) -> str:
        """In a fit: its ID, the same on every rank; a resumed fit keeps its ID."""
        return self.resume_point.run_id

    def _restore(
        self, prepared: PreparedModel, checkpoint: dict[str, Any], source: paths.Location
    ) -> None:
        """Restore the run from a checkpoint, and free the checkpoint's entries meanwhile."""
        self.resume_point = self.resume_point.of_run(checkpoint.get("run"))
        restore_model(self, prepared, checkpoint, source)
        restore_training(self, prepared, checkpoint, source)

    def checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint of this run; called on every rank."""
        return collect_checkpoint(self, self.weights(), weights_only=False)

    def weights(self) -> Weights:
        """Return the model's state for a checkpoint; called on every rank."""
        return collect_weights(self)

    def save(
        self, path: paths.Location, *, weights_only: bool, weights: Weights | None = None
    ) -> None:
        """Save a checkpoint of this run, after the current optimizer step.

        Args:
            path: the file or folder of the checkpoint.
            weights_only: if True, save at once, without the state of the training.
            weights: the model's state, if the caller already has it.
        """
        if self.is_within_step and not weights_only:
            self.deferred_saves.append(path)
            return
        # A run that resumes from this checkpoint does not write these rows again.
        self.rows.flush()
        checkpoint = collect_checkpoint(self, weights or self.weights(), weights_only=weights_only)
        save = self.profiling.wrap("save_checkpoint", self.runtime.checkpoint_writer.save)
        save(checkpoint, path)
        restarts = self.resume_point.restarts
        if restarts is not None and not weights_only:
            self.strategy.checkpoint_io.when_durable(lambda: restarts.saved(path))

    def flush_deferred_saves(self) -> None:
        """Save the checkpoints that were requested within the last optimizer step."""
        deferred, self.deferred_saves = self.deferred_saves, []
        for path in dict.fromkeys(deferred):
            self.save(path, weights_only=False)

    def _save_interrupted(self) -> str | None:
        """Save a checkpoint before a signal ends the run; return its path."""
        saver = self.trainer.checkpoint_callback
        if saver is None or saver.dirpath is None or self.trainer.options.fast_dev_run:
            return None
        path = saver.save_to_resume_from(self.trainer, "interrupted")
        self.runtime.checkpoint_writer.finish()
        return path

    # -- for the training loop

    def accumulation(self, epoch: int) -> int:
        """Return the number of batches in an optimizer step of an epoch."""
        return self.trainer.options.step_options.micro_batches_in(epoch)

    def should_stop(self) -> bool:
        """Return whether `Trainer.should_stop` is set and the minimum of training is reached.

        A stop that has to wait for the minimum becomes a part of the progress.
        """
        options, progress = self.trainer.options, self.progress
        has_minimum = (
            progress.global_step >= options.min_steps
            and progress.epoch + progress.epoch_is_done >= options.min_epochs
        )
        # A callback that may take its request back keeps it in its own state.
        progress.stop_delayed |= None in self.trainer._stops and not has_minimum
        return self.trainer.should_stop and has_minimum

    def request_stop(self, who: object, *, wanted: bool) -> None:
        """Ask for the end of training as `Trainer.should_stop` does, or take the request back.

        Requests of others stay. Called on every rank.

        Args:
            who: the callback that asks.
            wanted: whether training has to end, after the minimum of training.
        """
        (self.trainer._stops.add if wanted else self.trainer._stops.discard)(who)

    def interruption_check(self) -> Callable[[], bool]:
        """Return a function that checks after each step whether the fit is interrupted."""
        is_interrupted, checkpoint_io = self.interruption.check, self.strategy.checkpoint_io
        if not checkpoint_io.asynchronous:
            return is_interrupted

        def check() -> bool:
            checkpoint_io.raise_errors()
            return is_interrupted()

        return check

    def interrupt(self) -> None:
        """End the fit after the current step; on a signal, save it and end the process."""
        if self.interruption.signal is not None:
            self.interruption.end(self._save_interrupted)
        self.trainer.should_stop = True

    def end_train_epoch(self) -> None:
        """End an epoch: reduce its logged values, and call the hooks of its end."""
        metrics, progress = self.metrics, self.progress
        metrics.in_step = False
        progress.end_begun = True
        if not progress.epoch_is_done and self.rank_state is not None:
            # A run that resumes in this epoch continues from the values before this early end.
            self.rank_state.keep(epoch=self.rank_state.epoch.state())
        entries = metrics.entries
        names = {name for e in entries.values() for name in (e.name, e.step_name, e.epoch_name)}
        try:
            metrics.reduce_epoch()
            self.hooks.call_before_metrics("on_train_epoch_end")
        except BaseException:
            # A run that resumes from a checkpoint saved now ends the epoch again.
            progress.end_begun, metrics.entries = False, entries
            raise
        epoch = metrics.end_epoch()
        # Loggers receive the epoch's values at its last step, with the epoch's number.
        self.rows.write(epoch.for_loggers, progress.logged_step, progress.epoch)
        self.has_ended_epoch, self.logged_in_epoch = True, names | epoch.values.keys()
        self.schedulers.step_after_epoch(self.is_metric_pending)
        self.hooks.call_after_metrics("on_train_epoch_end")

    # -- for callbacks

    def run_training_data_without_grad(self) -> None:
        """Run `training_step` over an epoch without gradients, counting and logging.

        Training is over then: a checkpoint has the RNG states and the position of before.
        """
        if self.rank_state is not None:
            self.rank_state.keep(**self.rank_state.state())
        evaluation.run_training_data_without_grad(self)

    def is_metric_pending(self, name: str) -> bool:
        """Return whether a value that has not been logged yet may be logged later.

        Values may come at the end of this fit's first epoch, or by validation in a later epoch.
        """
        unknown = not self.has_ended_epoch
        comes_later = self.has_validation and self.validation.last_epoch == -1
        return (unknown or comes_later) and name not in self.latest.values

    @property
    def is_within_step(self) -> bool:
        """Whether an optimizer step has begun, but is not yet complete and has not failed."""
        return self.step is not None and self.step.is_under_way and not self.has_failed

    @property
    def has_validation(self) -> bool:
        """Whether this run is a fit that validates."""
        return self.fit_data is not None and bool(self.fit_data.validation)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether validation also runs within epochs, not only after their last batch."""
        return self.has_validation and self.trainer.options.val_check_interval != 1.0

    @property
    def validates_next(self) -> bool:
        """Whether validation runs before the next training batch; False if this is unknown."""
        epoch, batches = self.progress.epoch, self.trainer.num_training_batches
        if not self.validation.is_in_epoch(epoch) or batches == float("inf"):
            return False
        return self.validation.is_due(self.validation.interval(batches))

    @property
    def has_validated(self) -> bool:
        """Whether validation has run in the current epoch."""
        return self.progress.validated > 0

    def metric(self, name: str, who: str) -> Tensor:
        """Return the latest logged value of a name, the same on every rank that calls this.

        Where values differ between ranks, such as those of a single step, it is their mean. All
        ranks call this, so that what follows from the value is done on all of them.

        Args:
            name: the name of the value.
            who: the name of the class that needs the value, for the error.

        Raises:
            UserCodeError: if no value has this name. The error lists the logged names.
        """
        values = self.trainer.callback_metrics
        if name not in values:
            logged = ", ".join(sorted(values)) or "nothing"
            remedy = f"Log it in the Module with self.log({name!r}, ...)"
            if name.startswith("val") and (problem := unused_validation(self)):
                remedy = problem
            elif near := nearest_of(name, list(values)):
                remedy = f"Did you mean {near!r}? {remedy}"
            raise UserCodeError(
                f"{who}(monitor={name!r}): no value of that name was logged; there is {logged}. "
                + remedy
            )
        value: Tensor = values[name]
        of_ranks = self.strategy.ranks.all_gather(value)
        # The mean of equal values may be rounded.
        return value if bool((of_ranks == value).all()) else of_ranks.double().mean()

    def require_prepared(self) -> PreparedModel:
        """Return the prepared model.

        Raises:
            ConfigurationError: if the run ended before the model was prepared.
        """
        if self.prepared is None:
            raise ConfigurationError(
                "this needs a prepared model, but the last run ended before it was there"
            )
        return self.prepared


def _print_errors(function: Callable[..., object], *args: Any) -> None:
    """Call a function while another error is raised; print its errors, so as not to hide that."""
    try:
        function(*args)
    except Exception as error:
        print(f"stratagem: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


_runs: WeakKeyDictionary[Run, None] = WeakKeyDictionary()
"""The runs of this process whose prepared models may still hold resources, oldest first."""


def release_finished_engines(run: Run) -> None:
    """Free the engines of other Trainers' finished runs; a process may train many models."""
    for other in list(_runs):
        if other.runtime is not run.runtime and other.trainer.state.status != "running":
            del _runs[other]
            release(other.module)
    _runs[run] = None
