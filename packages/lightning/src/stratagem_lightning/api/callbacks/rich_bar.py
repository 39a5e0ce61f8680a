"""RichProgressBar: with a theme, as Lightning has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stratagem import callbacks
from stratagem_extras.callbacks import progress_bar_names
from stratagem_lightning.api.callbacks.progress import ProgressBar

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


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
    """The state of a bar.

    Args:
        total: the number of batches; None if unknown.
        completed: the number of finished batches at the end.
    """

    total: int | None
    completed: int


class RichProgressBar(progress_bar_names.RichProgressBar, ProgressBar):
    """Stratagem's bar, with the version of the logs and the number format of a theme.

    Args:
        refresh_rate: 0 hides the bar.
        leave: ignored: a line of each epoch stays in any case.
        theme: None: the default theme.
        console_kwargs: arguments of the `rich.console.Console` of the bar.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks.progress import rich_progress
        >>> theme = rich_progress.RichProgressBarTheme(metrics_format=".2e")
        >>> rich_progress.RichProgressBar(theme=theme).is_enabled
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
        self.train_progress_bar.completed = trainer.run.state.batches
        super().on_train_epoch_end(trainer, module)

    def _text(self, value: Any) -> str:
        whole = isinstance(value, (str, int))
        return str(value) if whole else f"{float(value):{self.theme.metrics_format}}"
