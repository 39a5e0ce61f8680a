"""Run: one fit, validate, test or predict on this rank, and everything that exists only for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.callbacks.callback import LOGGED
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.runtime.optimizer import wrap_optimizer
from stratagem.runtime.prepare import prepare
from stratagem.storage import paths
from stratagem.trainer import checks, folders, options, results, run_loggers
from stratagem.trainer.failure import end_failed
from stratagem.trainer.former_runs import release_others
from stratagem.trainer.hooks import Hooks
from stratagem.trainer.loaders.loaders import EvaluationLoader, source_of
from stratagem.trainer.loaders.open import close, open_evaluation_data, open_fit_data
from stratagem.trainer.loops import evaluation, fit as fit_loop
from stratagem.trainer.loops.interruption import Interruption
from stratagem.trainer.loops.validation import Validation
from stratagem.trainer.metrics.log_buffer import Rows
from stratagem.trainer.metrics.metrics import Metrics
from stratagem.trainer.profiling import Profiling
from stratagem.trainer.resume.checkpoint import (
    Weights,
    collect_checkpoint,
    collect_weights,
    read_checkpoint,
    restore_model,
    restore_training,
)
from stratagem.trainer.resume.find import find_checkpoint
from stratagem.trainer.step.hooked_step import check_closure, check_step_hooks
from stratagem.trainer.step.optimizers import configure, count_steps
from stratagem.trainer.step.schedulers import Schedulers
from stratagem.trainer.step.step import Step

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.runtime.runtime import Runtime
    from stratagem.trainer.job import Job
    from stratagem.trainer.loaders.train_loader import TrainLoader
    from stratagem.trainer.metrics.metrics import LatestValues
    from stratagem.trainer.progress import Progress
    from stratagem.trainer.resume.rank_state import RankState
    from stratagem.trainer.resume.restarts import Restarts
    from stratagem.trainer.trainer import Trainer


class Run:
    """One run of a Trainer on this rank.

    A callback that follows the run more closely than the Trainer's own attributes allow finds it as
    `trainer.run`.

    Args:
        trainer: holds the options and the callbacks.
        runtime: its strategy runs the plan.
        job: what was asked for.
        progress: how far training is; of the Trainer's last fit.
        latest: the latest values that were logged, since the Trainer's last fit began.
        before: the run before, whose prepared model is used again if it is the same model.
    """

    evaluating = ""
    """What of "validation", "test" and "predict" is running now."""
    has_ended_epoch = False
    """In a fit: whether an epoch has ended in it, with its values."""
    has_failed = False
    predictions: Sequence[list[Any]] = ()
    """What `predict_step` has returned so far, a list for each loader, where it is kept."""
    asked: str | Path | None = None
    """In a fit: what to resume from, which was asked for or which a restart calls for."""

    def __init__(
        self,
        trainer: Trainer,
        runtime: Runtime,
        job: Job,
        *,
        progress: Progress,
        latest: LatestValues,
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
        self.hooks: Hooks = Hooks(trainer, job.model, trainer.callbacks, self.profiling.wrap)
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self.rows = Rows(loggers, self.strategy.accelerator)
        self.metrics: Metrics = Metrics(
            self.strategy, self.rows, latest, every_n_steps=trainer.log_every_n_steps
        )
        """What training logs to."""
        self.prepared: PreparedModel | None = None
        self.optimizers: list[Any] = []
        """The optimizers as user code sees them: their steps go through the strategy."""
        self.schedulers: Schedulers = Schedulers(self.progress, self.metric, job.model)
        self.rank_state: RankState | None = None
        """Once a fit has begun: what this rank saves for itself and restores."""
        if before is not None and before.module is job.model:
            self.prepared, self.optimizers = before.prepared, before.optimizers
            self.schedulers.configs = before.schedulers.configs
            self.rank_state = before.rank_state
        self.train_loader: TrainLoader | None = None
        self.validation = Validation(self, [])
        """In a fit: its validation."""
        self.run_id = ""
        """In a fit: a name of its own, the same on every rank; a resumed one keeps the first's."""
        self.resumed_from: paths.Location | None = None
        """In a fit that was resumed: from what, which the user named and no checkpoint did."""
        self.evaluated_from: paths.Location | None = None
        """In an evaluation: the checkpoint whose weights it was given."""
        self.evaluation_loaders: dict[str, list[EvaluationLoader]] = {}
        """This rank's, by what they are for."""
        self.evaluated_batches = 0
        """Batches of validation or testing in this run; the step of what is logged for each."""
        self.restarts: Restarts | None = None
        """In a fit: what a restart by the cluster goes on from."""
        self.step: Step | None = None
        """In a fit: the optimizer step, which may be under way."""
        self.saves_due: list[paths.Location] = []
        """Checkpoints that were asked for within the present step, to be saved after it."""
        self.interruption = Interruption(
            self.strategy.ranks, self.strategy.cluster_environment, trainer.max_time
        )

    def execute(self) -> Any:
        """Set up what all four stages share, run the stage, and take it down."""
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
        folders.check_on_ranks(trainer, stage)
        restore_determinism = options.set_determinism(
            self.strategy.accelerator,
            deterministic=trainer.deterministic,
            benchmark=trainer.benchmark,
        )
        self.profiling.begin(self)
        before = LOGGED.set(module)
        try:
            run_loggers.begin(self)
            self.job.prepare_data(ranks)
            if datamodule is not None:
                datamodule.setup(stage)
            release_others(self)
            self.strategy.setup(trainer)
            self.hooks.call("setup", stage)
            with self.runtime.init_module():
                module.configure_model()
            with fit_loop.anomaly_detection(trainer.detect_anomaly):
                result = stages[stage]()
            self.hooks.call("teardown", stage)
            if datamodule is not None:
                datamodule.teardown(stage)
            status = "success"
            return result
        except BaseException as error:
            self.has_failed = True
            end_failed(self, error)
            raise
        finally:
            restore_determinism()
            LOGGED.reset(before)
            # It holds the graph of the last loss, and so what hooks of an engine hold.
            self.step = None
            # What was logged before an error is what explains it.
            self.rows.flush()
            self.profiling.end(self)
            if ranks.is_global_zero:
                for logger in trainer.loggers:
                    logger.finalize(status)

    def _position(self) -> str:
        if self.stage != "fit":
            return f"{self.stage}, batch {self.evaluated_batches}"
        return f"fit, epoch {self.progress.epoch}, step {self.progress.global_step}"

    # -- the stages

    def _fit(self) -> None:
        trainer, module, strategy = self.trainer, self.module, self.strategy
        checks.check_manual_optimization(module, trainer.plan, strategy, trainer.step_options)
        check_step_hooks(module, strategy, trainer.plan, trainer.step_options)
        checks.give_hints(strategy)
        path = self.resumed_from = self.resumed_from or self._find(self.asked)
        loader = open_fit_data(self)
        strategy.set_batch_size(loader.batch_size)
        checks.hint_at_log_interval(trainer, loader.batches)
        prepared = self._prepare_to_train()
        if path is not None:
            self._restore(prepared, read_checkpoint(self.runtime.checkpoint_writer, path), path)
        joined = strategy.adopt_peer_state(prepared, self.checkpoint)
        if joined is not None:
            self._restore(prepared, joined, "the run that this one joins")
        checks.hand_over_hyperparameters(self)
        run_loggers.log_graph(self)
        with module.logging_to(self.metrics):
            self.hooks.call("on_fit_start")
            if path is None and joined is None:
                self.validation.check_sanity(prepared)
            with ExitStack() as stack:
                stack.callback(close, self)
                stack.enter_context(self.interruption)
                fit_loop.fit(self, prepared, self.validation)
        self.hooks.call("on_fit_end")
        strategy.checkpoint_io.wait()

    def _prepare_to_train(self) -> PreparedModel:
        """Let the strategy prepare the model, and make its optimizers."""
        strategy = self.strategy
        prepared = self.prepared = prepare(strategy, self.module, self._make_optimizers)
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
            check_closure(
                optimizers[0], self.strategy, self.runtime.plan, self.trainer.step_options
            )
        checks.check_parameters(optimizers, self.module)
        return optimizers

    def _evaluate(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Return the values, and those of each loader."""
        what = "validation" if self.stage == "validate" else "test"
        method = "val_dataloader" if what == "validation" else "test_dataloader"
        source = source_of(method, self.job, self.job.loaders, needed=True)
        loaders = open_evaluation_data(self, source, what)
        checks.hand_over_hyperparameters(self)
        epoch = evaluation.evaluate(self, self._prepare_to_evaluate(), loaders, what)
        values = {name: float(value) for name, value in epoch.values.items()}
        return values, results.by_loader(values, epoch.loaders, len(loaders))

    def _predict(self) -> list[list[Any]]:
        source = source_of("predict_dataloader", self.job, self.job.loaders, needed=True)
        loaders = open_evaluation_data(self, source, "predict")
        return evaluation.predict(self, self._prepare_to_evaluate(), loaders)

    def _prepare_to_evaluate(self) -> PreparedModel:
        path = self.evaluated_from = self._find(self.job.ckpt_path)
        if self.prepared is None:
            self.prepared = prepare(self.strategy, self.module)
        if path is not None:
            checkpoint = read_checkpoint(self.runtime.checkpoint_writer, path)
            restore_model(self, self.prepared, checkpoint, path)
        return self.prepared

    # -- checkpoints

    def _find(self, asked: str | Path | None) -> paths.Location | None:
        return None if asked is None else find_checkpoint(self.trainer, asked)

    def _restore(
        self, prepared: PreparedModel, checkpoint: dict[str, Any], whence: paths.Location
    ) -> None:
        """Restore the run from a checkpoint, which nothing holds any more afterwards."""
        self.run_id = checkpoint.get("run") or self.run_id
        restore_model(self, prepared, checkpoint, whence)
        restore_training(self, prepared, checkpoint, whence)

    def checkpoint(self) -> dict[str, Any]:
        """Return this run as it is, as a file would hold it; called on every rank."""
        return collect_checkpoint(self, self.weights(), weights_only=False)

    def weights(self) -> Weights:
        """Return the model's state as it is saved; called on every rank."""
        return collect_weights(self)

    def save(
        self, path: paths.Location, *, weights_only: bool, weights: Weights | None = None
    ) -> None:
        """Save this run as it is, or once the step under way is taken; `weights`: where at hand."""
        if self.is_within_step and not weights_only:
            self.saves_due.append(path)
            return
        checkpoint = collect_checkpoint(self, weights or self.weights(), weights_only=weights_only)
        save = self.profiling.wrap("save_checkpoint", self.runtime.checkpoint_writer.save)
        save(checkpoint, path)
        restarts = self.restarts
        if restarts is not None and not weights_only:
            self.strategy.checkpoint_io.when_durable(lambda: restarts.saved(path))

    def save_due(self) -> None:
        """Save what was asked for within the step that has just been taken."""
        due, self.saves_due = self.saves_due, []
        for path in dict.fromkeys(due):
            self.save(path, weights_only=False)

    def _save_interrupted(self) -> str:
        """Save the run where checkpoints go, before a signal ends it; return the path, or ""."""
        saver = self.trainer.checkpoint_callback
        if saver is None or saver.dirpath is None:
            return ""
        path = saver.save_to_resume_from(self.trainer, "interrupted")
        self.runtime.checkpoint_writer.finish()
        return path

    # -- what the training loop asks

    def accumulation(self, epoch: int) -> int:
        """Return how many batches an optimizer step takes in an epoch."""
        return self.trainer.step_options.micro_batches_in(epoch)

    def should_stop(self) -> bool:
        """Whether training is to end here, by `Trainer.should_stop`; not before its minimum."""
        trainer, progress = self.trainer, self.progress
        return (
            trainer.should_stop
            and progress.global_step >= trainer.min_steps
            and progress.epoch + progress.epoch_is_done >= trainer.min_epochs
        )

    def interruption_check(self) -> Callable[[], bool]:
        """Return what is called after each step: whether the fit is to end here."""
        look, checkpoint_io = self.interruption.look, self.strategy.checkpoint_io
        if not checkpoint_io.asynchronous:
            return look

        def look_at_saves_too() -> bool:
            checkpoint_io.raise_errors()
            return look()

        return look_at_saves_too

    def interrupt(self) -> None:
        """End the fit after the present step; on a signal, save it and end the process."""
        if self.interruption.signal is not None:
            self.interruption.end(self._save_interrupted)
        self.trainer.should_stop = True

    def end_train_epoch(self) -> None:
        """Call the hooks of the epoch's end, and reduce what was logged in it."""
        metrics, progress = self.metrics, self.progress
        metrics.in_step = False
        metrics.reduce_epoch()
        self.hooks.call_all_but_monitors("on_train_epoch_end")
        epoch = metrics.end_epoch()
        # The epoch's values stand at its last step, with the epoch's number.
        last_step = max(0, progress.global_step - 1)
        self.rows.write(epoch.for_loggers, last_step, progress.epoch)
        self.has_ended_epoch = True
        self.schedulers.step_after_epoch(self.may_come_later)
        self.hooks.call_monitors("on_train_epoch_end")

    # -- what callbacks ask

    def pass_over_training_data(self) -> None:
        """Run `training_step` over an epoch without gradients; nothing is counted or logged."""
        evaluation.pass_over_training_data(self)

    def may_come_later(self, name: str) -> bool:
        """Whether a value that is not there yet may still be logged.

        At the end of the first epoch of this fit, or by validation in a later one.
        """
        unknown = not self.has_ended_epoch
        comes_later = self.has_validation and self.validation.last_epoch == -1
        return (unknown or comes_later) and name not in self.latest.values

    @property
    def is_within_step(self) -> bool:
        """Whether an optimizer step is under way; one that an error ended is not."""
        return self.step is not None and self.step.is_under_way and not self.has_failed

    @property
    def has_validation(self) -> bool:
        """Whether this fit validates."""
        return bool(self.validation.loaders)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether validation comes in the middle of epochs too, not only after their last batch."""
        return self.has_validation and self.trainer.val_check_interval != 1.0

    @property
    def validates_next(self) -> bool:
        """Whether validation comes before the next training batch, as far as that is known."""
        epoch, batches = self.progress.epoch, self.trainer.num_training_batches
        if not self.validation.is_in_epoch(epoch) or batches == float("inf"):
            return False
        interval = self.validation.interval(batches)
        return self.progress.batches % interval < self.accumulation(epoch)

    @property
    def has_validated(self) -> bool:
        """Whether validation ran in the present epoch."""
        return self.validation.last_epoch == self.progress.epoch

    @property
    def checkpoint_root(self) -> paths.Location:
        """The folder in which checkpoints get one of their own: that of the logs, or a URL."""
        root = self.trainer.default_root_dir
        return root if paths.is_url(root) else Path(self.trainer.log_dir)

    def metric(self, name: str, who: str) -> Tensor:
        """Return the latest logged value that somebody (`who`) waits for.

        Raises:
            UserCodeError: nothing of that name was logged; lists what was.
        """
        values = self.trainer.callback_metrics
        if name not in values:
            there = ", ".join(sorted(values)) or "nothing"
            raise UserCodeError(
                f"{who}(monitor={name!r}): no value of that name was logged; there is {there}. "
                f"Log it in the Module with self.log({name!r}, ...)"
            )
        return values[name]

    def require_prepared(self) -> PreparedModel:
        """Return the prepared model.

        Raises:
            ConfigurationError: the run ended before it was there.
        """
        if self.prepared is None:
            raise ConfigurationError(
                "this needs a prepared model, but the last run ended before it was there"
            )
        return self.prepared
