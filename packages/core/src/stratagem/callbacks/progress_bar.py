"""ProgressBar: how far training is, refreshed by time."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

from stratagem.callbacks.callback import Callback
from stratagem.launch.streams import printable

if TYPE_CHECKING:
    from rich.console import Console

    from stratagem.module import Module
    from stratagem.trainer import Trainer


class ProgressBar(Callback):
    """Shows epoch, batch, speed and the values logged with `prog_bar=True`, on rank 0.

    It is refreshed at most every `refresh_seconds`, whatever a step takes: values are read, and the
    device is waited for, only then. Without a terminal nothing is shown.

    Args:
        refresh_seconds: time between two refreshes; one costs 0.4 ms.
        console: a rich console, to show it elsewhere; None: standard output.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ProgressBar
        >>> slow = ProgressBar(refresh_seconds=5.0)
        >>> [bar is slow for bar in Trainer(callbacks=slow, enable_checkpointing=False).callbacks]
        [True]
    """

    def __init__(self, *, refresh_seconds: float = 0.1, console: Console | None = None) -> None:
        self.refresh_seconds = refresh_seconds
        self._console = console
        self._due = float("inf")
        self._bar: Any = None
        self._task: Any = None

    def _start(self, trainer: Trainer, what: str, total: float) -> None:
        """Show a bar for `total` batches; rich is imported only if anything is to be seen."""
        console = self._console
        if not trainer.is_global_zero or (console is None and not sys.stdout.isatty()):
            return
        if self._bar is None:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                # Brackets in a name are not rich's markup.
                TextColumn("{task.fields[values]}", markup=False),
                console=console,
                auto_refresh=False,
            )
            self._bar.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
        shown = None if total == float("inf") else total
        self._task = self._bar.add_task(what, total=shown, values="")
        self._due = monotonic() + self.refresh_seconds

    def _refresh(self, trainer: Trainer, completed: int) -> None:
        if self._bar is not None:
            values = "  ".join(
                f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items()
            )
            shown = printable(values, self._bar.console.encoding)
            self._bar.update(self._task, completed=completed, values=shown)
            self._bar.refresh()
            self._due = monotonic() + self.refresh_seconds

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._due = float("inf")

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch."""
        self._start(trainer, f"epoch {trainer.current_epoch}", trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh, if it is time."""
        if monotonic() >= self._due:
            self._refresh(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch's values."""
        self._refresh(trainer, trainer.batches_that_trained)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the terminal alive, if it is time."""
        if monotonic() >= self._due and self._bar is not None:
            self._bar.refresh()
            self._due = monotonic() + self.refresh_seconds

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Leave the last state on the screen."""
        self._stop()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Give the terminal back before the error is printed."""
        self._stop()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Give the terminal back."""
        self._stop()
