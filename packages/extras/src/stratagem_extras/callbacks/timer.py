"""Timer: how long training, validation and testing took, and an end to training by time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks import Callback, ProgressBar
from stratagem.errors import ConfigurationError
from stratagem.strategies import seconds

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

_STAGES = {"train": "train", "fit": "train", "validate": "validate", "test": "test"}


class Timer(Callback):
    """Measures the time of training, validation and testing, and ends training at a time limit.

    The time before a resume counts: `duration` is the total time of all runs. All ranks end after
    the same step, as with `max_time`.

    Args:
        duration: time to train: a timedelta, "DD:HH:MM:SS", a dict of timedelta's arguments, or
            seconds; None: no limit.
        interval: "step": end after any step; "epoch": after the epoch.
        verbose: print on rank 0 why training ended, unless a progress bar does.

    Raises:
        ConfigurationError: the duration or the interval has another form.

    Example:
        >>> from stratagem.callbacks import Timer
        >>> timer = Timer(duration="00:12:00:00")
        >>> timer.time_remaining()
        43200.0
    """

    def __init__(
        self,
        duration: str | float | timedelta | Mapping[str, int] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(f"Timer(interval={interval!r}): expected 'step' or 'epoch'")
        self._duration = seconds(duration, "Timer(duration)")
        self._interval = interval
        self._verbose = verbose
        self._offset = 0.0
        """Seconds of training in the runs that this one resumes."""
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def start_time(self, stage: str = "train") -> float | None:
        """Return the start of a stage by the monotonic clock, or None before it.

        Args:
            stage: "train", "validate" or "test".
        """
        return self._began.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the end of a stage by the monotonic clock, or None before it."""
        return self._ended.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage has taken."""
        stage = _stage(stage)
        began, offset = self._began.get(stage), self._offset if stage == "train" else 0.0
        return offset if began is None else self._ended.get(stage, monotonic()) - began + offset

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds, or None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    @property
    def stopping_reason(self) -> str:
        """Why the timer has ended training, in words; "" while time remains."""
        elapsed = self.time_elapsed()
        if self._duration is None or elapsed < self._duration:
            return ""
        return f"Timer(duration={self._duration:g} s) is up: {elapsed:.1f} s"

    def state_dict(self) -> dict[str, Any]:
        """Return how long each stage has taken."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES.values()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count the time of the run that is resumed."""
        self._offset = state.get("time_elapsed", {}).get("train", 0.0)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Let the run look at the clock; end it before its first step if no time is left."""
        remaining = self.time_remaining()
        if remaining is not None and self._interval == "step":
            trainer.run.interruption.end_within(remaining)
        # A run that is resumed may have used it up: no step is taken then.
        if trainer.ranks.broadcast(remaining is not None and remaining <= 0):
            trainer.should_stop = True

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Begin to count."""
        self._begin("train")

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """End it, and say why training ended where that is the reason."""
        self._ended["train"] = monotonic()
        reason = self.stopping_reason
        is_said = any(isinstance(callback, ProgressBar) for callback in trainer.callbacks)
        if self._verbose and reason and trainer.should_stop and not is_said:
            trainer.print(f"stratagem: training ended: {reason}")

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """End training at the time limit, by rank 0's clock."""
        if self._duration is None or self._interval != "epoch":
            return
        is_up = self.time_elapsed() >= self._duration
        if trainer.ranks.broadcast(is_up):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Begin to count."""
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """End it."""
        self._ended["validate"] = monotonic()

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Begin to count."""
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """End it."""
        self._ended["test"] = monotonic()

    def _begin(self, stage: str) -> None:
        self._began[stage] = monotonic()
        self._ended.pop(stage, None)


def _stage(name: str) -> str:
    # A str-valued enum counts as its value.
    text = str(getattr(name, "value", name))
    if text not in _STAGES:
        raise ConfigurationError(f"Timer: stage {name!r}, expected 'train', 'validate' or 'test'")
    return _STAGES[text]
