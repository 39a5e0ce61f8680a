"""Schedulers: when the learning rate schedulers of a run step, and with which value."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stratagem.trainer.optimizers import SchedulerConfig

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer.progress import Progress


class Schedulers:
    """The learning rate schedulers of a run.

    Args:
        progress: of the run.
        metric: returns the latest logged value of a name, for whom is named after it; an error if
            there is none.
        module: whose `lr_scheduler_step` steps them; with manual optimization the user's own code
            does.
    """

    def __init__(
        self, progress: Progress, metric: Callable[[str, str], Tensor], module: Module
    ) -> None:
        self.configs: list[SchedulerConfig] = []
        self._automatic = module.automatic_optimization
        self._progress = progress
        self._metric = metric
        self._take_step = module.lr_scheduler_step
        self._names_of_validation: set[str] = set()

    def suspend(self) -> None:
        """Step none of them from here on, in this fit: something else sets learning rates."""
        self._automatic = False

    def step(self, interval: str, count: int) -> None:
        """Step those that are due after the `count`-th epoch or step, without a value."""
        if not self._automatic:
            return
        for config in self.configs:
            if config.is_due(interval, count):
                self._take_step(config.scheduler, None)

    def step_after_validation(self, names: Collection[str]) -> None:
        """Step those that wait for one of the values that validation has logged."""
        self._names_of_validation.update(names)
        self._step_monitored(lambda name: name in self._names_of_validation)

    def step_after_epoch(self, may_come_later: Callable[[str], bool]) -> None:
        """Step those that wait for any other value.

        Args:
            may_come_later: whether a value that is not there yet may be logged in a later epoch.
        """
        self._step_monitored(
            lambda name: name not in self._names_of_validation and not may_come_later(name)
        )

    def _step_monitored(self, is_there: Callable[[str], bool]) -> None:
        """Step those that are due in this epoch, each with its value."""
        if not self._automatic or not self._progress.epoch_is_done:
            return
        for config in self.configs:
            name = config.monitor
            if name is None or (self._progress.epoch + 1) % config.frequency:
                continue
            if is_there(name):
                value = self._metric(name, type(config.scheduler).__name__)
                self._take_step(config.scheduler, value)

    def state(self) -> list[Any]:
        """Return the state of each."""
        return [config.scheduler.state_dict() for config in self.configs]

    def load_state(self, states: list[Any]) -> None:
        """Restore what `state` returned."""
        for config, state in zip(self.configs, states, strict=True):
            config.scheduler.load_state_dict(state)
