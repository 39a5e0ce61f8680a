"""Validation during a fit: when it runs, and on which loaders."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stratagem.data.sharding import UNKNOWN
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.rng import preserve_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.trainer.context import Limits, RunContext
    from stratagem.trainer.loaders.loaders import EvaluationLoader
    from stratagem.trainer.loaders.train_loader import FitData
    from stratagem.trainer.loops.interruption import Interruption
    from stratagem.trainer.metrics.metrics import EpochMetrics


class Validation:
    """The validation of a fit.

    Args:
        context: the objects of the fit.
        limits: the limits of the fit, with the number of batches in a step.
        interruption: has a clock on which the ranks agree.

    Attributes:
        data: this rank's data in the fit; None before the loaders are opened.
        last_epoch: the last epoch with a validation; -1 before the first.
        batches_of_epoch: the number of validation batches in that epoch.
        last_batches: the number of batches in the last validation.
        is_sanity_check: whether the sanity check before training is running.
        names_of_check: the names of the values that the sanity check has logged.
        note_values: called with the values of each validation before hooks see them.
        before_next: functions that are called once, before the next validation.
    """

    def __init__(self, context: RunContext, limits: Limits, interruption: Interruption) -> None:
        self._context = context
        self._trainer, self._state = context.trainer, context.state
        self._limits = limits
        self._interruption = interruption
        self.note_values: Callable[[Mapping[str, Any]], object]
        self.data: FitData | None = None
        self.last_epoch = -1
        self.batches_of_epoch = self.last_batches = 0
        self.is_sanity_check, self.names_of_check = False, list[str]()
        self.before_next: list[Callable[[], object]] = []
        interval = self._trainer.options.val_check_interval
        self._counts_over_epochs = self._trainer.options.check_val_every_n_epoch is None
        self.seconds = interval.total_seconds() if isinstance(interval, timedelta) else None
        """The time interval in seconds. None: the interval is a number of batches."""
        self._since = 0.0
        self._knows_since = False
        """Whether this time is known; several ranks agree on a time only at intervals."""

    @property
    def loaders(self) -> list[EvaluationLoader]:
        """The validation loaders of this rank; an empty list without validation."""
        return [] if self.data is None else self.data.validation

    @property
    def runs_within_epochs(self) -> bool:
        """Whether validation also runs within epochs, not only after their last batch."""
        return bool(self.loaders) and self._trainer.options.val_check_interval != 1.0

    @property
    def is_next(self) -> bool:
        """Whether validation runs before the next training batch; False if this is unknown."""
        epoch, batches = self._state.epoch, self._trainer.num_training_batches
        if not self.is_in_epoch(epoch) or batches == UNKNOWN:
            return False
        return self.is_due(self.interval(batches))

    def is_in_epoch(self, epoch: int) -> bool:
        """Return whether validation runs in an epoch."""
        every = self._trainer.options.check_val_every_n_epoch
        return bool(self.loaders) and (every is None or (epoch + 1) % every == 0)

    def interval_in(self, epoch: int, batches: float) -> float:
        """Return the `interval` in an epoch; 0 if validation does not run in it."""
        return self.interval(batches) if self.is_in_epoch(epoch) else 0

    def interval(self, batches: float) -> float:
        """Return the number of training batches between validations; infinity: an epoch.

        Args:
            batches: the number of batches of a training epoch; infinity if unknown.

        Returns:
            0 if the interval is a time.
        """
        interval = self._trainer.options.val_check_interval
        if isinstance(interval, timedelta):
            return 0
        if isinstance(interval, int):
            if interval > batches and self._trainer.options.check_val_every_n_epoch is not None:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {int(batches)} training "
                    "batches of an epoch, so validation would never run: pass a smaller number, or "
                    "check_val_every_n_epoch=None, which counts batches over epochs"
                )
            return interval
        if batches == UNKNOWN:
            if interval == 1.0:
                return UNKNOWN
            raise UserCodeError(
                f"the training data loader has no length, so val_check_interval={interval} cannot "
                "be taken of it: pass a number of batches (int)"
            )
        return max(1, int(batches * interval))

    def is_due(self, interval: float) -> bool:
        """Return whether validation is due after the last optimizer step, by the number of batches.

        Args:
            interval: the result of `interval`.
        """
        if interval == 0:
            return False
        state, batches = self._state, self._state.batches
        if self._counts_over_epochs:
            batches += state.batches_before
        # Older checkpoints lack the number of batches of their last step.
        return batches % interval < (state.last_step or self._limits.accumulation(state.epoch))

    def is_missing(self, batches: float) -> bool:
        """Return whether a finished epoch lacks its last validation.

        Args:
            batches: see `interval`.
        """
        state = self._state
        if state.validated >= state.batches or not self.is_in_epoch(state.epoch):
            return False
        interval = self.interval(batches)
        if interval == UNKNOWN or self.is_due(interval):
            return True
        # The data may end before the last validation that their length promised.
        ends_early = state.batches < batches and not self._counts_over_epochs
        return ends_early and interval > 0 and batches % interval == 0

    def start_clock(self) -> None:
        """Restart the time until the next validation, if the interval is a time."""
        if self.seconds is not None:
            interruption = self._interruption
            self._since, self._knows_since = interruption.agreed_time(), interruption.is_alone

    def run_if_time(self, prepared: PreparedModel) -> None:
        """Run validation if its time interval has passed; called on every rank after each step."""
        assert self.seconds is not None
        now = self._interruption.agreed_time()
        if not self._knows_since:
            self._knows_since, self._since = now != self._since, now
        elif now - self._since >= self.seconds and self.is_in_epoch(self._state.epoch):
            self.run(prepared)
            self.start_clock()

    def run(self, prepared: PreparedModel) -> None:
        """Run validation between two training steps, or at the end of an epoch."""
        context, data, state = self._context, self.data, self._state
        assert data is not None
        while self.before_next:
            self.before_next.pop(0)()
        context.rows.flush()
        if data.reloads_validation():
            data.reopen_validation()
        if self.last_epoch != state.epoch:
            self.last_epoch, self.batches_of_epoch = state.epoch, 0
        before, rank_state = context.progress.batches, data.rank_state
        # A run that resumes from a checkpoint that is saved within it validates again.
        rank_state.keep(**rank_state.values(warns=False))
        context.module.on_validation_model_zero_grad()
        from stratagem.trainer.loops.evaluation import evaluate  # only fits that validate

        evaluate(context, prepared, self.loaders, "validation", at_end=self._end)
        self.last_batches = context.progress.batches - before
        self.batches_of_epoch += self.last_batches

    def _end(self, epoch: EpochMetrics) -> None:
        """Note that all batches are evaluated; called before schedulers and callbacks use them."""
        assert self.data is not None
        self.data.rank_state.keep()
        self._state.validated = self._state.batches
        self.note_values(epoch.values)

    def check_sanity(self, prepared: PreparedModel) -> None:
        """Run a few validation batches before training, so that errors appear early."""
        context, steps = self._context, self._trainer.options.num_sanity_val_steps
        if not self.loaders or steps == 0:
            return
        from stratagem.trainer.loops.evaluation import evaluate

        limit = UNKNOWN if steps == -1 else steps
        few = [replace(one, batches=min(one.batches, limit)) for one in self.loaders]
        self.is_sanity_check = True
        context.hooks.call("on_sanity_check_start")
        try:
            # Training draws the same random numbers, with this check and without it.
            with preserve_rng_state(context.strategy.accelerator, context.strategy.device):
                epoch = evaluate(context, prepared, few, "validation", is_sanity_check=True)
            self.names_of_check = list(epoch.values)
            context.progress.batches = 0
            context.hooks.call("on_sanity_check_end")
        finally:
            self.is_sanity_check = False
            context.progress.batches = 0
