"""Logger: where logged values go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Logger(ABC):
    """Receives values, on rank 0.

    Call sequence: `log_hyperparams` once; `log_metrics` for each row of values, in order of steps,
    some time after they were logged (an evaluation's batches are numbered from 0); `save` now and
    then; `finalize` at the end.

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.loggers import Logger
        >>> class Printing(Logger):
        ...     log_dir = "."
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> Lite(accelerator="cpu", loggers=Printing()).log("loss", 0.5, step=3)
        3 {'loss': 0.5}
    """

    @property
    @abstractmethod
    def log_dir(self) -> str:
        """The folder of this run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take the values of one step (an optimizer step, counted from 0)."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Take the hyperparameters."""

    def save(self) -> None:
        """Write what is held back."""

    def finalize(self, status: str) -> None:
        """Write everything and close; `status` is "success" or "failed"."""
