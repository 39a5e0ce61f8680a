"""Run: one fit, validate, test or predict on this rank, and the objects that exist only for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from stratagem.callbacks.callback import LOGGED
from stratagem.discovery.absent import explain_missing
from stratagem.errors import ConfigurationError
from stratagem.interfaces.user_names import show
from stratagem.launch.process import printable
from stratagem.launch.rank import show_raised_error, this_rank
from stratagem.runtime.optimizer import wrap_optimizer
from stratagem.runtime.prepare import prepare, release
from stratagem.storage import paths
from stratagem.trainer import checks
from stratagem.trainer.context import (
    EvaluationProgress,
    FitContext,
    FitState,
    Limits,
    RunContext,
    StepContext,
)
from stratagem.trainer.hooks import Hooks
from stratagem.trainer.loaders.loaders import EvaluationLoader, open_evaluation
from stratagem.trainer.loaders.train_loader import FitData
from stratagem.trainer.loops.fit import functions_after_step
from stratagem.trainer.loops.interruption import Interruption
from stratagem.trainer.loops.validation import Validation
from stratagem.trainer.metrics.log_buffer import LogBuffer
from stratagem.trainer.metrics.metrics import Metrics, Monitor
from stratagem.trainer.options import set_determinism
from stratagem.trainer.profiling import Profiling
from stratagem.trainer.resume.checkpoint import (
    Contents,
    Saves,
    collect_checkpoint,
    read_checkpoint,
    restore_model,
    restore_training,
    save_interrupted,
)
from stratagem.trainer.resume.epoch_state import EpochState
from stratagem.trainer.resume.find import ResumePoint, find_resume_point, newest_checkpoint
from stratagem.trainer.step.contract_check import check_step_hooks
from stratagem.trainer.step.loss_weight import check_loss_weight
from stratagem.trainer.step.optimizers import check_closure, configure, count_steps
from stratagem.trainer.step.schedulers import Schedulers

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.job import Job
    from stratagem.trainer.resume.rank_state import RankState
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer

_EVALUATED = {"fit": "validation", "validate": "validation", "test": "test", "predict": "predict"}


class Run:
    """The objects of one run of a Trainer on this rank.

    Callbacks that need more than the Trainer's attributes can read them as `trainer.run`. In core
    only this module takes a whole Run as an argument: the training loop gets a `FitContext`, a step
    a `StepContext`, an evaluation a `RunContext`, a checkpoint its `Contents`.

    Args:
        trainer: the Trainer, which holds the options and the callbacks.
        job: the request.
        before: the previous run. If it had the same model, its prepared model is used again.

    Attributes:
        resume_point: the checkpoint that this run loads, if any, and the identity of a fit.
        metrics: receives the values of `log` in training.
        monitor: reads the logged values.
        saves: saves checkpoints.
        validation: in a fit, when validation runs.
        interruption: in a fit, signals and the time limit.
        fit_data: in a fit, this rank's data.
        evaluation_loaders: this rank's loaders, by "validation", "test" or "predict".
        prepared: the prepared model; None before its preparation.
        optimizers: the optimizers for user code; their steps go through the strategy.
        step: in a fit, the optimizer step, which may have begun.
    """

    def __init__(self, trainer: Trainer, job: Job, before: Run | None) -> None:
        self.trainer = trainer
        self.runtime = runtime = trainer.runtime
        self.job = job
        self.stage = job.stage
        self.module = job.model
        self.datamodule = job.datamodule
        self.strategy = runtime.strategy
        self.policy = trainer.policy
        self.limits = Limits(trainer)
        self.state = state = trainer.fit_state
        self.latest = latest = trainer.latest_metrics
        self.latest.bar.clear()
        self.profiling = Profiling(trainer._profiler, type(self.strategy).__name__)
        self.callbacks = [*trainer.callbacks, *checks.hints_of_run(trainer)]
        self.hooks: Hooks = Hooks(trainer, job.model, self.callbacks, self.profiling.wrap)
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self.rows = LogBuffer(loggers, self.strategy.accelerator)
        every = trainer.options.log_every_n_steps
        self.metrics: Metrics = Metrics(
            self.strategy, self.rows, latest, every_n_steps=every, module=job.model
        )
        self.evaluation = EvaluationProgress()
        self.context = RunContext(
            trainer=trainer,
            job=job,
            module=job.model,
            datamodule=job.datamodule,
            strategy=self.strategy,
            hooks=self.hooks,
            rows=self.rows,
            latest=latest,
            profiling=self.profiling,
            policy=self.policy,
            state=state,
            progress=self.evaluation,
        )
        self.interruption = Interruption(
            self.strategy.ranks,
            self.strategy.cluster_environment,
            trainer.options.max_time,
            stop=partial(state.stop_requests.add, None),
            save=partial(save_interrupted, trainer),
        )
        self.validation = Validation(self.context, self.limits, self.interruption)
        self.monitor = Monitor(latest, state, self.strategy.ranks, self.validation, job)
        self.schedulers: Schedulers = Schedulers(
            state, self.monitor, job.model, counts_batches=self.policy.schedulers_count_batches
        )
        self.validation.note_values = self.schedulers.note_validation
        self.evaluation_loaders: dict[str, list[EvaluationLoader]] = {}
        self.fit_data: FitData | None = None
        self.prepared: PreparedModel | None = None
        self.optimizers: list[Any] = []
        self.step: Step | None = None
        self.has_failed = False
        self.resume_point = ResumePoint()
        self.saves = Saves(self.contents, lambda: self.is_within_step)
        self._former_rank_state: RankState | None = None
        self.group = runtime.group
        if before is not None and before.module is job.model and before.group == self.group:
            self.prepared, self.optimizers = before.prepared, before.optimizers
            self.schedulers.configs = before.schedulers.configs
            self._former_rank_state = before.rank_state
        elif before is not None and before.prepared is not None:
            release(before.module, before.prepared)

    @property
    def rank_state(self) -> RankState | None:
        """The RNG states and the position in the data of this rank's last fit."""
        return self._former_rank_state if self.fit_data is None else self.fit_data.rank_state

    @property
    def is_within_step(self) -> bool:
        """Whether an optimizer step has begun, but is not yet complete and has not failed."""
        return self.step is not None and self.step.is_under_way and not self.has_failed

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

    def request_stop(self, who: object, *, wanted: bool) -> None:
        """Ask for the end of training as `Trainer.should_stop` does, or take the request back.

        Requests of others stay. Called on every rank.

        Args:
            who: the callback that asks.
            wanted: whether training has to end, after the minimum of training.
        """
        requests = self.state.stop_requests
        (requests.add if wanted else requests.discard)(who)

    def contents(self) -> Contents:
        """Return the objects with state in a checkpoint.

        Raises:
            ConfigurationError: if the run ended before the model was prepared.
        """
        return Contents(
            **vars(self.context),
            prepared=self.require_prepared(),
            schedulers=self.schedulers,
            data=self.fit_data,
            former=self._former_rank_state,
            step=self.step,
            resume_point=self.resume_point,
        )

    def checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint of this run; called on every rank."""
        return collect_checkpoint(self.contents(), self.saves.weights(), weights_only=False)

    def open_fit_data(self) -> FitData:
        """Create this rank's loaders for a fit."""
        epoch = EpochState(self.context, self.metrics, self.schedulers)
        opened = self.evaluation_loaders
        self.fit_data = self.validation.data = FitData(self.context, epoch, opened)
        return self.fit_data

    def open_evaluation_data(self) -> list[EvaluationLoader]:
        """Create this rank's loaders for an evaluation."""
        what = _EVALUATED[self.stage]
        loaders = self.evaluation_loaders[what] = open_evaluation(self.context, what)
        return loaders

    def make_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the Module, and keep its schedulers."""
        if self.strategy.makes_optimizers and not self.module.defines("configure_optimizers"):
            self.schedulers.configs = []
            return []
        optimizers, self.schedulers.configs = configure(self.module)
        if self.module.automatic_optimization and optimizers:
            options = self.trainer.options.step_options
            check_closure(optimizers[0], self.strategy, self.runtime.plan, options)
        checks.check_parameters(optimizers, self.module)
        return optimizers

    def run_training_data_without_grad(self) -> None:
        """Run `training_step` over an epoch without gradients, counting and logging."""
        from stratagem.trainer.loops import evaluation  # only runs that evaluate

        assert self.fit_data is not None
        evaluation.run_training_data_without_grad(
            self.context, self.require_prepared(), self.fit_data
        )


# -- the stages


@contextmanager
def prepare_fit(run: Run) -> Iterator[FitContext]:
    """Prepare a fit, yield what the training loop reads, and end the fit after the loop."""
    prepared, is_resumed = prepare_to_train(run)
    with run.module.logging_to(run.metrics):
        run.hooks.call("on_fit_start")
        run.interruption.begin()
        if not is_resumed:
            run.validation.check_sanity(prepared)
        context = make_context(run, prepared)
        with closing(context.data):
            try:
                yield context
            except RuntimeError as error:
                explained = context.step.explain(error) or run.strategy.explain(prepared, error)
                if explained is None:
                    raise
                raise explained from error
    run.hooks.call("on_fit_end")
    run.strategy.checkpoint_io.wait()


def make_context(run: Run, prepared: PreparedModel) -> FitContext:
    """Return what the training loop reads, with the optimizer step."""
    assert run.fit_data is not None
    parts = StepContext(
        **vars(run.context),
        prepared=prepared,
        optimizers=run.optimizers,
        data=run.fit_data,
        schedulers=run.schedulers,
        limits=run.limits,
        metrics=run.metrics,
    )
    step = run.step = run.trainer.make_train_step(parts)
    run.profiling.watch(step)
    context = FitContext(
        **vars(parts),
        step=step,
        run_step=run.profiling.wrap("run_training_batch", step.step_function()),
        validation=run.validation,
        saves=run.saves,
        interruption=run.interruption,
        checks=checks.EpochChecks(parts, step),
    )
    return replace(context, after_step=functions_after_step(context, run.state))


def prepare_to_train(run: Run) -> tuple[PreparedModel, bool]:
    """Open the data, prepare the model and its optimizers, and restore the checkpoint.

    Returns:
        The prepared model, and whether this run continues another one.
    """
    trainer, module, strategy = run.trainer, run.module, run.strategy
    options = trainer.options
    checks.check_manual_optimization(module, trainer.plan, strategy, options.step_options)
    check_step_hooks(module, strategy, trainer.plan)
    if trainer.policy.weighs_losses:
        check_loss_weight(module, strategy, trainer.plan)
    checks.give_hints(strategy)
    data = run.open_fit_data()
    strategy.set_batch_size(data.loader.batch_size)
    checks.hint_at_log_interval(trainer, data.loader.batches)
    checks.hint_at_mistakes(trainer, run.job)
    is_new = run.prepared is None
    prepared = run.prepared = prepare(strategy, module, run.make_optimizers)
    show(strategy, prepared)
    run.optimizers = [wrap_optimizer(o, prepared, strategy) for o in prepared.optimizers]
    for optimizer in () if module.automatic_optimization else run.optimizers:
        count_steps(optimizer, run.state)
    path = run.resume_point.path
    if is_new and options.weights is not None:
        options.weights.start(strategy, prepared, reads=path is None)
    if path is not None:
        restore(run, read_checkpoint(run.runtime.checkpoint_writer, path), path)
    joined = strategy.adopt_peer_state(prepared, run.checkpoint)
    if joined is not None:
        restore(run, joined, "the run that this one joins")
    checks.log_hyperparameters(trainer, module, run.datamodule)
    for logger in trainer.loggers if strategy.ranks.is_global_zero else ():
        logger.log_graph(module)
    return prepared, path is not None or joined is not None


def restore(run: Run, checkpoint: dict[str, Any], source: paths.Location) -> None:
    """Restore a fit from a checkpoint, and free the checkpoint's entries meanwhile."""
    run.resume_point = run.resume_point.of_run(checkpoint.get("run"))
    contents = run.contents()
    restore_model(contents, run.callbacks, checkpoint, source)
    restore_training(contents, checkpoint, source)


def run_evaluation(run: Run) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Validate or test a model; return the metrics of all loaders together, and of each loader."""
    from stratagem.trainer.loops import evaluation

    loaders = run.open_evaluation_data()
    checks.log_hyperparameters(run.trainer, run.module, run.datamodule)
    epoch = evaluation.evaluate(
        run.context, prepare_to_evaluate(run), loaders, _EVALUATED[run.stage]
    )
    values = {name: float(value) for name, value in epoch.values.items()}
    everywhere = range(len(loaders))
    return values, [
        {n: v for n, v in values.items() if index in epoch.loaders.get(n, everywhere)}
        for index in everywhere
    ]


def run_prediction(run: Run) -> list[list[Any]]:
    """Return this rank's predictions of each loader."""
    from stratagem.trainer.loops import evaluation

    loaders = run.open_evaluation_data()
    return evaluation.predict(run.context, prepare_to_evaluate(run), loaders)


def prepare_to_evaluate(run: Run) -> PreparedModel:
    """Prepare the model, unless the last run has, and load the weights of a checkpoint."""
    path, weights = run.resume_point.path, run.trainer.options.weights
    if run.prepared is None:
        run.prepared = prepare(run.strategy, run.module)
        if weights is not None:
            weights.start(run.strategy, run.prepared, reads=path is None)
    show(run.strategy, run.prepared)
    if path is not None:
        checkpoint = read_checkpoint(run.runtime.checkpoint_writer, path)
        restore_model(run.contents(), run.callbacks, checkpoint, path)
    return run.prepared


EVALUATIONS: dict[str, Callable[[Run], Any]] = {
    "validate": run_evaluation,
    "test": run_evaluation,
    "predict": run_prediction,
}
"""The functions of the stages without training."""


# -- the start and the end of each stage


@contextmanager
def set_up(run: Run) -> Iterator[None]:
    """Set up a run, and tear it down at the end; after an error, call its hooks and explain it."""
    trainer, module, ranks = run.trainer, run.module, run.strategy.ranks
    status = "failed"
    ranks.report_status(partial(position, run.stage, run.state, run.evaluation))
    checks.check_folders_on_ranks(trainer, run.stage)
    restore_determinism = set_determinism(run.strategy.accelerator, trainer.options)
    run.profiling.begin(trainer, run.stage)
    before = LOGGED.set(ref(module))
    try:
        call_setup(run)
        detects = trainer.options.detect_anomaly
        with torch.autograd.set_detect_anomaly(True, check_nan=True) if detects else nullcontext():
            yield
        run.hooks.call("teardown", run.stage)
        if run.datamodule is not None:
            run.datamodule.teardown(run.stage)
        status = "success"
    except BaseException as error:
        run.has_failed = True
        end_failed(run, error)
        raise
    finally:
        restore_determinism()
        LOGGED.reset(before)
        # The step holds the graph of the last loss, and so the objects of an engine's hooks.
        run.step = None
        # The values from before an error help to explain it.
        run.rows.flush()
        run.profiling.end(run.stage)
        for logger in trainer.loggers if ranks.is_global_zero else ():
            if run.stage == "fit":
                logger.steps_taken = run.state.global_step
            run.rows.attempt(logger, partial(logger.finalize, status))
        if run.has_failed and run.interruption.is_pending:
            show_raised_error()  # the signal may end the process at once
        run.interruption.finish()


def call_setup(run: Run) -> None:
    """Find the checkpoint to resume from, and call what prepares data, strategy and model."""
    # First, because callbacks read the loggers' folder, which a resumed run keeps.
    run.resume_point = find_resume_point(run.trainer, run.job)
    run.job.prepare_data(run.strategy.ranks)
    if run.datamodule is not None:
        run.datamodule.setup(run.stage)
    release_finished_engines(run)
    run.strategy.setup(run.trainer)
    run.hooks.call("setup", run.stage)
    with run.runtime.init_module():
        run.module.configure_model()


def position(stage: str, state: FitState, evaluation: EvaluationProgress) -> str:
    """Return where a run is, for the report of a rank that others wait for."""
    return f"fit, {state}" if stage == "fit" else f"{stage}, batch {evaluation.batches}"


def end_failed(run: Run, error: BaseException) -> None:
    """Explain an error, call the hooks for it, and keep earlier values and checkpoints.

    The caller raises the error. Further errors are only printed here, so that they do not hide it.
    """
    optimizers = () if run.prepared is None else run.prepared.optimizers
    from stratagem.runtime.device_errors import explain_device_error  # after failures only

    explain_device_error(error, run.strategy, run.module, optimizers)
    if isinstance(error, AttributeError):
        explain_missing(error, run.module)
    if this_rank.device_is_lost:
        run.rows.drop_device_values()
    of_data = () if run.datamodule is None else (run.datamodule.on_exception,)
    for hook in (*run.hooks.of("on_exception"), *of_data):
        _print_errors(hook, error)
    # Checkpoints that were saved before the error become durable.
    _print_errors(run.strategy.checkpoint_io.wait_at_error)
    if isinstance(error, KeyboardInterrupt) and run.strategy.ranks.is_global_zero:
        print(printable(describe_interrupt(run), sys.stderr.encoding), file=sys.stderr, flush=True)


def describe_interrupt(run: Run) -> str:
    """Return two lines of text: where Ctrl-C ended a run, and how to resume it."""
    if run.stage != "fit":
        number = run.evaluation.batches
        batches = f"{number} batch" if number == 1 else f"{number} batches"
        return f"\nstratagem: {run.stage} was interrupted, after {batches}"
    saved = newest_checkpoint(run.trainer)
    follows = "there is no checkpoint yet"
    if saved:
        follows = f"trainer.fit(..., ckpt_path={saved!r}) resumes the run"
    return (
        f"\nstratagem: interrupted in epoch {run.state.epoch}, after step "
        f"{run.state.global_step}\nstratagem: {follows}"
    )


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
