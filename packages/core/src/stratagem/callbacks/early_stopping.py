"""EarlyStopping: ends training when a value stops improving."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

from stratagem.callbacks.callback import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class EarlyStopping(Callback):
    """Ends training when a value has not improved for a while.

    The value is the same on every rank, since epoch values are reduced over ranks; so all ranks
    stop at the same epoch.

    Args:
        monitor: name of the logged value.
        min_delta: a change smaller than this is no improvement.
        patience: how many checks without improvement end training.
        mode: "min": smaller is better; "max".
        check_finite: end training when the value is NaN or infinite; False: that is no improvement.

    Example:
        >>> from stratagem.callbacks import EarlyStopping
        >>> EarlyStopping("val_acc", mode="max", patience=5).state_key
        'EarlyStopping(val_acc, max)'
    """

    monitors = True

    def __init__(
        self,
        monitor: str,
        *,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        check_finite: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"EarlyStopping(mode={mode!r}): expected 'min' or 'max'")
        if math.isnan(min_delta):
            raise ConfigurationError(
                "EarlyStopping(min_delta=nan): expected a number; no change would count"
            )
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = mode
        self.check_finite = check_finite
        self.best_score = math.inf if mode == "min" else -math.inf
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = ""
        """Why it has ended training, in words; "" where it has not."""

    @property
    def state_key(self) -> str:
        """Names the value and the mode: a run may have several."""
        return f"EarlyStopping({self.monitor}, {self.mode})"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long ago it was."""
        return {
            "best_score": self.best_score,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.best_score = state["best_score"]
        self.wait_count = state["wait_count"]
        self.stopped_epoch = state["stopped_epoch"]

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Look at the value, if validation comes in the middle of epochs."""
        if not trainer.sanity_checking and trainer.run.validates_within_epochs:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Look at the value, if the epoch's values are complete only now."""
        if not trainer.run.has_validation or (
            trainer.run.has_validated and not trainer.run.validates_within_epochs
        ):
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        score = float(trainer.run.metric(self.monitor, "EarlyStopping"))
        if self.check_finite and not math.isfinite(score):
            if trainer.is_global_zero:
                warnings.warn(
                    f"EarlyStopping ends training after step {trainer.global_step}: "
                    f"{self.monitor} is {score}. check_finite=False goes on",
                    stacklevel=2,
                )
            self._stop(trainer, f"{self.monitor} is {score}")
            return
        sign = 1.0 if self.mode == "min" else -1.0
        if sign * score < sign * self.best_score - self.min_delta:
            self.best_score = score
            self.wait_count = 0
            return
        self.wait_count += 1
        if self.wait_count >= self.patience:
            best = f"{self.monitor} has not improved on {self.best_score:.4g}"
            self._stop(trainer, f"{best} (patience={self.patience})")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        self.stopping_reason = f"EarlyStopping: {reason}"
        self.stopped_epoch = trainer.current_epoch
        trainer.should_stop = True
