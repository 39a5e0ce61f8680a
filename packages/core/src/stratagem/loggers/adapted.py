"""AdaptedLogger: an object that takes values as a Logger does, and is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.loggers.logger import Logger

_OPTIONAL = ("log_hyperparams", "log_graph", "after_save_checkpoint", "save", "finalize")


class AdaptedLogger(Logger):
    """Hands on to an object whatever it has methods for; `log_metrics` it must have.

    Whatever else is asked of it, that object has: `trainer.logger.experiment` is the object's own.

    Args:
        adapted: takes `log_metrics(metrics, step)`; where there are any, `log_hyperparams`,
            `log_graph`, `after_save_checkpoint`, `save` and `finalize` are called as a Logger's.

    Example:
        >>> from stratagem import Trainer
        >>> class Printing:
        ...     def log_metrics(self, metrics, step):
        ...         print(step, metrics)
        >>> trainer = Trainer(accelerator="cpu", logger=Printing())
        >>> trainer.logger.log_metrics({"loss": 0.5}, 3)
        3 {'loss': 0.5}
    """

    def __init__(self, adapted: Any) -> None:
        self.adapted = adapted
        for name in _OPTIONAL:
            if callable(method := getattr(adapted, name, None)):
                setattr(self, name, method)
        for name in ("name", "version"):
            if isinstance(value := getattr(adapted, name, None), (int, str)):
                setattr(self, name, value)
        self.experiment = getattr(adapted, "experiment", None)
        save_dir = getattr(adapted, "save_dir", None)
        self.save_dir = save_dir if isinstance(save_dir, (str, Path)) else None

    def __getattr__(self, name: str) -> Any:
        if name == "adapted":  # a copy, before it has one
            raise AttributeError(name)
        return getattr(self.adapted, name)

    @property
    def log_dir(self) -> str:
        """The object's own folder, or its `save_dir`; "": it has none."""
        folder = getattr(self.adapted, "log_dir", None)
        return str(folder) if isinstance(folder, (str, Path)) else super().log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take the values of one step."""
        self.adapted.log_metrics(metrics, step)
