"""What a fit is made of: `FitContext`, which does not change, and `FitState`, which does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.interfaces.stepping import TrainStep
    from stratagem.interfaces.strategy import Strategy
    from stratagem.module.datamodule import DataModule
    from stratagem.module.module import Module
    from stratagem.trainer.checks import EpochChecks
    from stratagem.trainer.hooks import Hooks
    from stratagem.trainer.job import Job
    from stratagem.trainer.loaders.train_loader import FitData
    from stratagem.trainer.loops.interruption import Interruption
    from stratagem.trainer.loops.validation import Validation
    from stratagem.trainer.metrics.log_buffer import LogBuffer
    from stratagem.trainer.metrics.metrics import LatestMetrics, Metrics
    from stratagem.trainer.profiling import Profiling
    from stratagem.trainer.resume.checkpoint import Saves
    from stratagem.trainer.step.schedulers import Schedulers
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer


_SAVED = {"is_saved": True}
"""The metadata of the fields of `FitState` that are part of checkpoints."""


@dataclass
class FitState:
    """The state of the training loop. Checkpoints have the fields with the metadata `_SAVED`.

    Attributes:
        epoch: the current epoch, counted from 0.
        global_step: the number of optimizer steps taken.
        batches: the number of finished batches in this epoch, on each rank.
        epoch_is_done: whether all batches of this epoch are finished, so that only the end of the
            epoch is left.
        validated: the value of `batches` at the last validation in this epoch; 0: no validation
            yet.
        batches_before: the number of batches in all previous epochs.
        last_step: the number of batches in the last optimizer step; 0 if unknown.
        end_begun: whether the hooks of this epoch's end have begun.
        stop_delayed: whether `Trainer.should_stop` was set before the minimum of training.
        stop_requests: the callbacks that ask for the end of training. None in it represents
            `Trainer.should_stop`.
        has_ended_epoch: whether an epoch has ended in this run, so that its metrics are available.
        logged_in_epoch: the names that training has logged in the epoch that ended last.
        ended_by_hook: whether `on_train_batch_start` has ended this epoch, which is then not
            validated.
    """

    epoch: int = field(default=0, metadata=_SAVED)
    global_step: int = field(default=0, metadata=_SAVED)
    batches: int = field(default=0, metadata=_SAVED)
    epoch_is_done: bool = field(default=False, metadata=_SAVED)
    validated: int = field(default=0, metadata=_SAVED)
    batches_before: int = field(default=0, metadata=_SAVED)
    last_step: int = field(default=0, metadata=_SAVED)
    end_begun: bool = field(default=False, metadata=_SAVED)
    stop_delayed: bool = field(default=False, metadata=_SAVED)
    stop_requests: set[object] = field(default_factory=set)
    has_ended_epoch: bool = False
    logged_in_epoch: set[str] = field(default_factory=set)
    ended_by_hook: bool = False

    @property
    def logged_step(self) -> int:
        """The step of logged values: the index of the last optimizer step; 0 before the first."""
        return max(0, self.global_step - 1)

    def __str__(self) -> str:
        """Return where the loop is, for the report of a rank that others wait for."""
        return f"epoch {self.epoch}, step {self.global_step}"

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.batches_before += self.batches
        self.batches = 0
        self.epoch_is_done = self.end_begun = False
        self.validated = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that are part of checkpoints."""
        return {name: getattr(self, name) for name in _SAVED_NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields; if the end of the epoch had begun, go to the next epoch."""
        # Older checkpoints lack some.
        complete = {**FitState().state_dict(), "end_begun": state["epoch_is_done"], **state}
        for name in _SAVED_NAMES:
            setattr(self, name, complete[name])
        if self.epoch_is_done and self.end_begun:
            self.next_epoch()


_SAVED_NAMES = [one.name for one in fields(FitState) if one.metadata]


class Limits:
    """The limits of a fit, read from `Trainer.options` each time: a user may replace the options.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def reached(self, state: FitState, *, within_epoch: bool = False) -> str:
        """Return the name of the option whose limit is reached; "": none is.

        Args:
            state: the state of the training loop.
            within_epoch: only compare limits that may end an epoch before its last batch.
        """
        if 0 <= self._trainer.options.max_steps <= state.global_step:
            return "max_steps"
        return "max_epochs" if not within_epoch and self.has_all_epochs(state) else ""

    def has_all_epochs(self, state: FitState) -> bool:
        """Return whether `max_epochs` is reached."""
        return 0 <= self._trainer.options.max_epochs <= state.epoch

    def has_minimum(self, state: FitState) -> bool:
        """Return whether `min_steps` and `min_epochs` are reached."""
        options = self._trainer.options
        return (
            state.global_step >= options.min_steps
            and state.epoch + state.epoch_is_done >= options.min_epochs
        )

    def may_stop(self, state: FitState) -> bool:
        """Return whether a stop is requested and the minimum of training is reached."""
        return bool(state.stop_requests) and self.has_minimum(state)

    def ends_epoch(self, state: FitState) -> bool:
        """Return whether the epoch ends here: a limit is reached, or training may stop."""
        return bool(self.reached(state, within_epoch=True)) or self.may_stop(state)

    def note_delayed_stop(self, state: FitState) -> None:
        """Note in the state that `Trainer.should_stop` has to wait for the minimum of training.

        A callback that may take its request back keeps it in its own state.
        """
        state.stop_delayed |= None in state.stop_requests and not self.has_minimum(state)

    def accumulation(self, epoch: int) -> int:
        """Return the number of batches in an optimizer step of an epoch."""
        return self._trainer.options.step_options.micro_batches_in(epoch)


@dataclass(frozen=True)
class StepPolicy:
    """How a Trainer's loop and steps differ from the default, for a front end of other conventions.

    Attributes:
        reads_before_hooks: create a loader's iterator before the hooks that start a loop, not after
            them.
        counts_each_loss: if an optimizer computes the loss of a batch several times, add each of
            them to the epoch's values, not only the first.
        divides_by_window: divide a loss by `accumulate_grad_batches` also in an epoch's last step,
            which may have fewer batches.
        clears_before_backward: clear gradients before the first backward of the next step, not
            after the step.
        divides_loss_in_hooks: pass the divided loss to `on_before_backward`.
        schedulers_count_batches: schedulers of steps count the batches of the epoch, not the
            optimizer steps.
        validates_at_stop: validate where `Trainer.should_stop` ends an epoch before its last batch.
        draws_at_reload: draw a random number for each training loader that is created again.
        weighs_losses: weight the losses of a step by the model's `loss_weight`, if it has one.
        hints_at_log_interval: print a hint if `log_every_n_steps` exceeds the batches of an epoch.

    Example:
        >>> from stratagem.trainer import StepPolicy, Trainer
        >>> class Divides(Trainer):
        ...     policy = StepPolicy(divides_by_window=True)
    """

    reads_before_hooks: bool = False
    counts_each_loss: bool = False
    divides_by_window: bool = False
    clears_before_backward: bool = False
    divides_loss_in_hooks: bool = False
    schedulers_count_batches: bool = False
    validates_at_stop: bool = False
    draws_at_reload: bool = False
    weighs_losses: bool = True
    hints_at_log_interval: bool = True


@dataclass(frozen=True, eq=False)
class RunContext:
    """The constant objects of a run. Evaluations, also within a fit, read it.

    Attributes:
        trainer: the Trainer, with its options, its plan and its way to feed batches.
        job: the request.
        module, datamodule: the objects of the user.
        strategy: the strategy, with its ranks.
        hooks: the hooks of the module and the callbacks.
        rows, latest: receive the logged values.
        profiling: passes actions to the profiler.
        policy: how the steps and the loops differ from the default.
        state: the state of the training loop in the Trainer's last fit.
        progress: the name and position of the running evaluation.
    """

    trainer: Trainer
    job: Job
    module: Module
    datamodule: DataModule | None
    strategy: Strategy
    hooks: Hooks
    rows: LogBuffer
    latest: LatestMetrics
    profiling: Profiling
    policy: StepPolicy
    state: FitState
    progress: EvaluationProgress


@dataclass(frozen=True, eq=False)
class StepContext(RunContext):
    """The objects that the optimizer steps of a fit use, for `Trainer.make_train_step`.

    Attributes:
        prepared: the prepared model.
        optimizers: the optimizers for user code; their steps go through the strategy.
        data: this rank's loaders; a later creation of the loaders may change their number of
            batches.
        schedulers: the learning rate schedulers.
        limits: the limits of epochs and steps, and the minimum of training.
        metrics: receives the values of `log`.
    """

    prepared: PreparedModel
    optimizers: Sequence[Any]
    data: FitData
    schedulers: Schedulers
    limits: Limits
    metrics: Metrics


@dataclass(frozen=True, eq=False)
class FitContext(StepContext):
    """The constant objects of a fit. `make_context` creates it, and the loop reads it.

    Attributes:
        step: the optimizer step, with its micro-batches and hooks.
        run_step: `Strategy.train_step`, or the function that takes its place.
        validation: when and on which loaders the fit validates.
        saves: saves checkpoints.
        interruption: ends the fit on signals and after `max_time`.
        checks: checks the parameters and the steps of each epoch.
        after_step: functions that are called after each step, in this order. A plain fit has one,
            which looks for a signal.
    """

    step: Step
    run_step: Callable[[PreparedModel, TrainStep, Collection[Any]], None]
    validation: Validation
    saves: Saves
    interruption: Interruption
    checks: EpochChecks
    after_step: tuple[Callable[[], None], ...] = ()


@dataclass
class EvaluationProgress:
    """The progress of validation, testing or predicting in a run.

    Attributes:
        what: the current evaluation: "validation", "test" or "predict"; "" between evaluations.
        batches: the number of batches in this run so far, used as the step of logged values.
        predictions: the results of `predict_step` so far, a list for each loader; empty if not
            kept.
    """

    what: str = ""
    batches: int = 0
    predictions: Sequence[list[Any]] = ()


@dataclass
class RunState:
    """The state of a Trainer.

    Attributes:
        stage: "fit", "validate", "test", "predict", or "" between runs.
        status: "running", "finished" or "interrupted".
        fn: "fit", "validate", "test" or "predict": the current or last run. None: no run yet.
    """

    stage: str = ""
    status: str = "finished"
    fn: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last run ended without an exception."""
        return self.status == "finished"
