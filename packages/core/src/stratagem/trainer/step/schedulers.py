"""Schedulers: when the learning rate schedulers of a run step, and with which value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from stratagem.errors import UserCodeError
from stratagem.state.state_checks import load_scheduler_state
from stratagem.trainer.step.optimizers import SchedulerConfig

if TYPE_CHECKING:
    from stratagem.module.module import Module
    from stratagem.trainer.context import FitState
    from stratagem.trainer.metrics.metrics import Monitor


class Schedulers:
    """The learning rate schedulers of a run.

    Args:
        state: the state of the training loop.
        monitor: reads the logged values.
        module: the Module; its `lr_scheduler_step` steps the schedulers. With manual optimization,
            the user's code steps them.
        counts_batches: schedulers with the interval "step" count the batches of the epoch, not the
            optimizer steps.
    """

    def __init__(
        self, state: FitState, monitor: Monitor, module: Module, *, counts_batches: bool
    ) -> None:
        self.configs: list[SchedulerConfig] = []
        self._automatic = module.automatic_optimization
        self._state = state
        self._monitor = monitor
        self._counts_batches = counts_batches
        self._take_step = module.lr_scheduler_step
        self._names_of_validation: set[str] = set()
        self._seen = -1
        """The last optimizer step after which schedulers with a value were checked."""

    def suspend(self) -> None:
        """Stop stepping schedulers for the rest of the fit; a callback sets learning rates."""
        self._automatic = False

    def steps(self) -> int:
        """Return the step count for schedulers with the interval "step"."""
        return self._state.batches if self._counts_batches else self._state.global_step

    def step(self, interval: str, count: int) -> None:
        """Step the schedulers that are due after the `count`-th epoch or step, without a value."""
        if not self._automatic:
            return
        for config in self.configs:
            if not config.reduce_on_plateau and config.is_due(interval, count):
                self._take_step(config.scheduler, None)

    def note_validation(self, names: Collection[str]) -> None:
        """Note the names that validation has logged."""
        self._names_of_validation.update(names)

    def step_after_epoch(self) -> None:
        """Step the schedulers with a monitored value that are due after an epoch.

        A value of validation counts only in an epoch with a validation.
        """
        if not self._automatic or not self._state.epoch_is_done:
            return
        old = () if self._state.validated else self._names_of_validation
        self._step_with_values(
            "epoch",
            self._state.epoch + 1,
            lambda name: name in old or self._monitor.is_pending(name),
        )

    @property
    def have_values_by_steps(self) -> bool:
        """Whether a scheduler with the interval "step" monitors a value."""
        return self._automatic and any(
            config.reduce_on_plateau and config.interval == "step" for config in self.configs
        )

    def step_after_step(self) -> None:
        """Step the schedulers with a monitored value that are due after an optimizer step.

        A validation after the optimizer step runs first.
        """
        if self._state.global_step == self._seen or not self.have_values_by_steps:
            return
        self._seen = self._state.global_step
        self._step_with_values("step", self.steps(), self._monitor.is_pending)

    def _step_with_values(
        self, interval: str, count: int, is_pending: Callable[[str], bool]
    ) -> None:
        """Step the schedulers with a monitored value that are due and have their value."""
        for config in self.configs:
            is_due = config.reduce_on_plateau and config.is_due(interval, count)
            if is_due and not is_pending(str(config.monitor)):
                self._step_with_value(config)

    def _step_with_value(self, config: SchedulerConfig) -> None:
        try:
            value = self._monitor.mean_over_ranks(
                str(config.monitor), type(config.scheduler).__name__
            )
        except UserCodeError as error:
            if config.strict:
                raise
            warnings.warn(f"{error}; it is left as it is, with strict=False", stacklevel=2)
            return
        self._take_step(config.scheduler, value)

    def position(self) -> dict[str, Any]:
        """Return the position in the schedule of monitored values, as weights-only-safe data."""
        return {"seen": self._seen, "of_validation": sorted(self._names_of_validation)}

    def go_on_from(self, position: dict[str, Any]) -> None:
        """Restore a `position`."""
        self._seen = position["seen"]
        self._names_of_validation = set(position["of_validation"])

    def state(self) -> list[Any]:
        """Return the states of all schedulers."""
        return [config.scheduler.state_dict() for config in self.configs]

    def load_state(self, states: list[Any]) -> None:
        """Restore the states of all schedulers."""
        for config, state in zip(self.configs, states, strict=True):
            load_scheduler_state(config.scheduler, state)
