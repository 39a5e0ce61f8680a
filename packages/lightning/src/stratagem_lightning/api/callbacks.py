"""Callbacks with what Lightning's have beside Stratagem's: a reason, a theme."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from stratagem import callbacks
from stratagem_extras.callbacks import progress_bar_names
from stratagem_lightning.api.progress import ProgressBar

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class EarlyStoppingReason(IntEnum):
    """What has ended training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(callbacks.EarlyStopping):
    """Stratagem's, with its reason as an `EarlyStoppingReason`.

    Args:
        *args, **options: of `stratagem.callbacks.EarlyStopping`.
        log_rank_zero_only: only rank 0 says anything, also with False.

    Example:
        >>> from stratagem_lightning.api.callbacks import EarlyStopping
        >>> EarlyStopping("val_loss").stopping_reason.name
        'NOT_STOPPED'
    """

    def __init__(self, *args: Any, log_rank_zero_only: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)

    @property
    def best_score(self) -> Any:
        """The best value so far, of shape ()."""
        return torch.tensor(self._best_score, dtype=torch.float64)

    @best_score.setter
    def best_score(self, score: Any) -> None:
        self._best_score = float(score)

    @property
    def stopping_reason(self) -> EarlyStoppingReason:
        """What has ended training; `stopping_reason_message` says it in words."""
        return EarlyStoppingReason[(self.stopped_by or "not_stopped").upper()]

    @stopping_reason.setter
    def stopping_reason(self, reason: EarlyStoppingReason) -> None:
        self.stopped_by = "" if not reason else reason.name.lower()

    def state_dict(self) -> dict[str, Any]:
        """Return the reason too."""
        reason = {"stopped_by": self.stopped_by, "message": self.stopping_reason_message}
        return {**super().state_dict(), "best_score": self._best_score, "reason": reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        super().load_state_dict(state)
        reason = state.get("reason", {})
        self.stopped_by = reason.get("stopped_by", "")
        self.stopping_reason_message = reason.get("message")


@dataclass
class RichProgressBarTheme:
    """How a bar looks; Stratagem's follows `metrics_format` only."""

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


@dataclass
class ShownBar:
    """What a bar stands for.

    Args:
        total: batches; None: not known.
        completed: those that were done when it ended.
    """

    total: int | None
    completed: int


class RichProgressBar(progress_bar_names.RichProgressBar, ProgressBar):
    """Stratagem's, which shows the version of the logs too, and numbers as the theme has it.

    Args:
        refresh_rate: 0: show no bar.
        leave: a line of each epoch stays in any case.
        theme: None: the default one.
        console_kwargs: arguments of the `rich.console.Console` that it is shown on.

    Example:
        >>> from stratagem_lightning.api.callbacks import RichProgressBar, RichProgressBarTheme
        >>> RichProgressBar(theme=RichProgressBarTheme(metrics_format=".2e")).is_enabled
        True
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate, leave, console_kwargs=console_kwargs)
        self.theme = theme or RichProgressBarTheme()
        self.train_progress_bar = ShownBar(None, 0)
        """The last epoch that has begun."""

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Find out where to show it, as Stratagem's does."""
        callbacks.ProgressBar.setup(self, trainer, module, stage)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch."""
        total = self.total_train_batches
        self.train_progress_bar = ShownBar(None if total == float("inf") else int(total), 0)
        super().on_train_epoch_start(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Leave a line of the epoch."""
        self.train_progress_bar.completed = trainer.run.progress.batches
        super().on_train_epoch_end(trainer, module)

    def _text(self, value: Any) -> str:
        whole = isinstance(value, (str, int))
        return str(value) if whole else f"{float(value):{self.theme.metrics_format}}"
