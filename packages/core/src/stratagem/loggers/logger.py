"""Logger: where logged values go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Logger(ABC):
    """Receives values, on rank 0.

    Call sequence:
        0. `save_dir` before processes start, `log_dir` when a run begins.
        1. `log_hyperparams`, once, if the Module has hyperparameters.
        2. `log_rows` with the rows of the last steps, every two seconds or every 256 rows, and at
           the end of each epoch. By default it calls `log_metrics` for each of them, in the order
           of steps (an evaluation's batches are numbered from 0), and then `save`.
        3. `finalize`, when the run ends, however it ends; all rows have come before.

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.loggers import Logger
        >>> class Printing(Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> Lite(accelerator="cpu", loggers=Printing()).log("loss", 0.5, step=3)
        3 {'loss': 0.5}
    """

    save_dir: str | Path | None = None
    """The local folder that it writes into, which a Trainer tries before it starts processes; None:
    there is none to try."""

    @property
    def log_dir(self) -> str:
        """The folder of this run, by default `save_dir`; "": it has none, as where values are sent.

        A Trainer puts checkpoints beside it, or else into its `default_root_dir`.
        """
        return "" if self.save_dir is None else str(self.save_dir)

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take the values of one step (an optimizer step, counted from 0)."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Take the values of several steps, each as (step, values), and write them."""
        for step, metrics in rows:
            self.log_metrics(metrics, step)
        self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Take the hyperparameters."""

    def save(self) -> None:
        """Write what is held back."""

    def finalize(self, status: str) -> None:
        """Write everything and close; `status` is "success" or "failed"."""
