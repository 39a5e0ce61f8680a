"""Make a Trainer's loggers from names, Loggers, and other objects with the methods of a Logger."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.discovery.former import check_former_names
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.loggers.logger import Logger
from stratagem.runtime.runtime import as_list
from stratagem.storage import paths

Loggers = bool | Logger | Sequence[Logger | str] | str | None
"""The Trainer's argument `logger`."""

_OPTIONAL = ("log_hyperparams", "log_graph", "after_save_checkpoint", "save", "finalize")


class AdaptedLogger(Logger):
    """Adapts an object with the method `log_metrics` to the interface of a Logger.

    All other attributes are the object's own, such as `trainer.logger.experiment`.

    Args:
        adapted: an object with `log_metrics(metrics, step)`. Its methods `log_hyperparams`,
            `log_graph`, `after_save_checkpoint`, `save` and `finalize`, if it has them, are called
            as a Logger's.

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
        if name == "adapted":  # a copy without attributes yet
            raise AttributeError(name)
        return getattr(self.adapted, name)

    @property
    def log_dir(self) -> str:
        """The object's `log_dir`, or else its `save_dir`; "": the object has no folder."""
        folder = getattr(self.adapted, "log_dir", None)
        return str(folder) if isinstance(folder, (str, Path)) else super().log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the values of a step."""
        self.adapted.log_metrics(metrics, step)


def make_loggers(requested: Loggers, root: paths.Location) -> list[Logger]:
    """Return the loggers of a Trainer.

    Args:
        requested: the argument `logger`.
        root: the folder for logs; for a URL, the current folder is used.

    Raises:
        ConfigurationError: an object has no `log_metrics`.
        UnknownNameError: no installed distribution provides a logger of this name.
    """
    if requested is False:
        return []
    folder = Path.cwd() if paths.is_url(root) else Path(root)
    if requested is None or requested is True:
        requested = "csv"
    return [_make_logger(logger, folder) for logger in as_list(requested)]


def _make_logger(requested: Any, folder: Path) -> Logger:
    made = requested
    if isinstance(requested, str):
        spec = get_registry().find("logger", requested).spec
        takes_folder = "save_dir" in inspect.signature(spec.load()).parameters
        made = spec.build(**({"save_dir": folder} if takes_folder else {}))
    if isinstance(made, Logger):
        check_former_names(type(made))
        return made
    if not callable(getattr(made, "log_metrics", None)) or isinstance(made, type):
        raise ConfigurationError(
            f"logger={made!r}: expected a stratagem.loggers.Logger, the name of one, an object "
            "with log_metrics(metrics, step), a list of them, True or False"
        )
    return AdaptedLogger(made)
