"""ProgressBar: shows the start, the progress and the end of a run."""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from stratagem.callbacks.callback import Callback
from stratagem.callbacks.progress.display import Display, Row, display_here
from stratagem.callbacks.progress.report import beginning, ending
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from stratagem.module.module import Module
    from stratagem.trainer import Trainer


class ProgressBar(Callback):
    """Shows the start, the progress and the end of a run on rank 0.

    A bar shows the epoch, its batches, their speed, the elapsed and remaining time, and the values
    logged with `prog_bar=True`. Validation, testing and predicting have their own bars. A line
    remains for each epoch. In a notebook, and without `stratagem-extras`, the bar is a line of
    text. If stdout is not a terminal (a pipe, the log of SLURM, of a container or of CI), a line is
    written to stderr every `line_seconds`, and at the end of each epoch. The bar also prints the
    devices, the folders of logs and checkpoints, the reason why training ended, and the best
    checkpoint.
    `Trainer(enable_progress_bar=False)` disables all of this output.

    Values are read from the device only at a refresh. To show other values, override `get_metrics`.
    A subclass that overrides `setup` without calling `super().setup` shows only its own output.

    Args:
        refresh_seconds: the time between two refreshes; a refresh takes 0.4 ms.
        line_seconds: the time between two lines without a terminal.
        console: a rich console for the output, which needs `stratagem-extras`; None for standard
            output.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ProgressBar
        >>> slow = ProgressBar(refresh_seconds=5.0)
        >>> [bar is slow for bar in Trainer(callbacks=slow, enable_checkpointing=False).callbacks]
        [True]
    """

    runs_after_metrics = True

    def __init__(
        self,
        *,
        refresh_seconds: float = 0.1,
        line_seconds: float = 30.0,
        console: Console | None = None,
    ) -> None:
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._console = console
        self._enabled = True
        self._trainer: Trainer | None = None
        self._due = inf
        """The time of the next refresh."""
        self._display: Display | None = None
        self._rows: list[Row] = []
        """The current rows: an epoch, and a validation within it."""
        self._evaluated_from = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the run and the display."""
        return {**vars(self), "_trainer": None, "_display": None, "_rows": [], "_due": inf}

    # -- for users to call and override

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the shown run.

        Raises:
            ConfigurationError: no run has begun.
        """
        if self._trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__}.trainer: there is none before a run begins; expected it to "
                "be read in a hook, after super().setup(...)"
            )
        return self._trainer

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is enabled."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is disabled."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bar from the next run on."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar from the next run on."""
        self._enabled = False

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """Return the values to show beside the bar: numbers and strings by name.

        Example:
            >>> from stratagem.callbacks import ProgressBar
            >>> class Percent(ProgressBar):
            ...     def get_metrics(self, trainer, module):
            ...         shown = super().get_metrics(trainer, module)
            ...         return {n: f"{v:.0%}" if n == "acc" else v for n, v in shown.items()}
        """
        return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}

    def print(self, *values: Any, **options: Any) -> None:
        """Print without breaking the bar; `Module.print` calls this on rank 0.

        Args:
            *values: as for the built-in function.
            **options: as for the built-in function.
        """
        print(*values, **options)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Choose the display, if the bar is enabled."""
        self._trainer, self._display = trainer, None
        if trainer.is_global_zero and self.is_enabled:
            self._display = display_here(self.refresh_seconds, self.line_seconds, self._console)

    # -- rows

    def _begin(self, what: str, total: float, done: int = 0) -> None:
        if self._display is not None:
            self._rows.append(Row(what, total, done))
            self._display.begin(self._rows[-1])
            self._due = monotonic() + self._display.interval

    def _refresh(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._read_values(trainer)
            self._display.refresh(self._rows[-1])
            self._due = monotonic() + self._display.interval

    def _end(self, *, leave: bool) -> None:
        if self._display is not None and self._rows:
            self._display.end(self._rows.pop(), leave=leave)

    def _read_values(self, trainer: Trainer) -> None:
        """Show the values of training beside the epoch, and no values beside an evaluation."""
        if not trainer.run.evaluation.what:
            shown = self.get_metrics(trainer, trainer.run.module)
            self._rows[-1].values = "  ".join(
                f"{name} {self._text(v)}" for name, v in shown.items()
            )

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else f"{float(value):.4g}"

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
        self._display = None
        self._rows.clear()
        self._due = inf

    # -- training

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Print the devices, the model and the folders of the fit."""
        if self._display is not None:
            for line in beginning(trainer):
                self._display.say(line)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch."""
        epochs = trainer.options.max_epochs
        last = "" if epochs == -1 else f"/{epochs - 1}"
        done = trainer.run.state.batches
        self._begin(f"epoch {trainer.current_epoch}{last}", batches_to_train(trainer), done)

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh the bar, if a refresh is due."""
        if monotonic() >= self._due:
            self._rows[-1].done = batch_idx + 1
            self._refresh(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Leave a line for the epoch."""
        if self._display is not None:
            self._rows[-1].done = trainer.run.state.batches
            self._read_values(trainer)
            self._end(leave=True)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Print the reason why training ended, and the best checkpoints."""
        if self._display is not None:
            for line in ending(trainer):
                self._display.say(line)

    # -- evaluation

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Show a bar for the validation."""
        if self._rows and self._display is not None:
            self._rows[-1].done = trainer.run.state.batches
            self._display.update(self._rows[-1])
        is_check = trainer.sanity_checking
        self._begin_evaluation(trainer, "sanity check" if is_check else "validation")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Show a bar for the test."""
        self._begin_evaluation(trainer, "test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Show a bar for the prediction."""
        self._begin_evaluation(trainer, "predict")

    def _begin_evaluation(self, trainer: Trainer, what: str) -> None:
        self._evaluated_from = monotonic()
        self._begin(what, sum(batches_to_evaluate(trainer, trainer.run.evaluation.what)))

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Refresh the bar, if a refresh is due."""
        if self._rows:
            self._rows[-1].done += 1
            if monotonic() >= self._due:
                self._refresh(trainer)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Remove the bar of the evaluation, and subtract its time from the training's."""
        self._end(leave=False)
        if self._rows:
            self._rows[-1].began += monotonic() - self._evaluated_from

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    # -- the end

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Release the terminal before the error is printed."""
        self._close()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Release the terminal."""
        self._close()


def batches_to_train(trainer: Trainer) -> float:
    """Return the number of batches at which the epoch ends, by its data or by `max_steps`.

    Call this between two steps. The number is infinity if unknown, as in manual optimization.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import batches_to_train
        >>> batches_to_train(Trainer(accelerator="cpu", devices=1, logger=False))
        inf
    """
    batches, model = trainer.num_training_batches, trainer.model
    max_steps, epoch = trainer.options.max_steps, trainer.current_epoch
    if max_steps == -1 or model is None or not model.automatic_optimization:
        return batches
    left = (max_steps - trainer.global_step) * trainer.run.limits.accumulation(epoch)
    return min(batches, trainer.run.state.batches + left)


def batches_to_evaluate(trainer: Trainer, what: str) -> list[float]:
    """Return the number of batches of each loader; loaders that are read together count once.

    Args:
        trainer: the Trainer of the run; its sanity check has fewer batches.
        what: "validation", "test" or "predict".

    Example:
        >>> import torch
        >>> from stratagem import Module, Trainer
        >>> from stratagem.callbacks import batches_to_evaluate
        >>> class Line(Module):
        ...     def predict_step(self, batch):
        ...         return batch
        >>> trainer = Trainer(accelerator="cpu", devices=1, enable_progress_bar=False, logger=False)
        >>> _ = trainer.predict(Line(), torch.utils.data.DataLoader(torch.ones(6, 1), 2))
        >>> batches_to_evaluate(trainer, "predict")
        [3.0]
    """
    steps = trainer.options.num_sanity_val_steps if trainer.sanity_checking else -1
    most = inf if steps == -1 else steps
    return [min(most, one.batches) for one in trainer.run.evaluation_loaders.get(what, [])]
