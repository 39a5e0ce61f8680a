"""Loggers: with the defaults that Lightning's have, where they differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import loggers
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_only, rank_zero_warn
from stratagem_extras.loggers import comet_logger, mlflow_logger, tensorboard_logger, wandb_logger
from stratagem_extras.loggers.sdk_logger import DummyExperiment
from stratagem_extras.loggers.values import write_hyperparameters

_NAME = "lightning_logs"


def _one_folder(
    owner: str, save_dir: str | Path | None, root_dir: str | Path | None
) -> str | Path | None:
    """Return the folder that was given under either name; None: neither.

    Raises:
        ConfigurationError: both were given.

    Example:
        >>> _one_folder("CSVLogger", None, "logs")
        'logs'
    """
    if save_dir is not None and root_dir is not None:
        raise ConfigurationError(
            f"{owner}(save_dir={str(save_dir)!r}, root_dir={str(root_dir)!r}): expected one of "
            "the two, which mean the same"
        )
    return root_dir if save_dir is None else save_dir


class Logger(loggers.Logger):
    """A logger of a Trainer: a subclass of Fabric's, so that a class may have both as its bases.

    All loggers are instances of it.

    Example:
        >>> from stratagem_lightning.api.loggers import CSVLogger, Logger
        >>> isinstance(CSVLogger("logs"), Logger)
        True
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return loggers.Logger in other.__mro__ if cls is Logger else NotImplemented

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log each row, called from where dvclive writes its files: it looks for this name."""

        def update_train_step_metrics() -> None:
            super(Logger, self).log_rows(rows)

        update_train_step_metrics()


class CSVLogger(loggers.CSVLogger):
    """A CSVLogger of the folder `lightning_logs`; rows without a step are counted.

    A subclass may override `experiment` with a writer of its own, which then gets each row by
    `log_metrics(metrics, step)`, the hyperparameters by `log_hparams(params)`, and calls of
    `save()`.

    Args:
        save_dir, name, version, **options: of `stratagem.loggers.CSVLogger`.
        root_dir: another name for `save_dir`, as Fabric has it.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = _NAME,
        version: int | str | None = None,
        *,
        root_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        folder = _one_folder(type(self).__name__, save_dir, root_dir)
        super().__init__(folder, name, version, **options)
        self._next_step = 0
        self._may_replace = version is not None
        """Whether the rows of an earlier run with this version are still to be moved away."""

    @property
    def experiment(self) -> Any:
        """The logger itself, which first moves the rows of an earlier run of this version away."""
        if self._may_replace and rank_zero_only.rank == 0 and self._file.exists():
            there = self._file.with_suffix(f".{self._file.stat().st_mtime_ns}.csv")
            rank_zero_warn(
                f"Experiment logs directory {self.log_dir} exists and is not empty: its rows are "
                f"moved from {self._file.name} to {there.name}"
            )
            self._file.rename(there)
        self._may_replace = False
        return super().experiment

    hparams_file = "hparams.yaml"
    NAME_HPARAMS_FILE = hparams_file

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row.

        Args:
            metrics: the values of the row.
            step: the step; None for the step after the previous row, at first 0.
        """
        step = self._next_step if step is None else step
        self._next_step = step + 1
        # The argument is the row's step, also beside a value of this name.
        metrics = {name: value for name, value in metrics.items() if name != "step"}
        if (writer := self.experiment) is self:
            super().log_metrics(metrics, step)
        else:
            writer.log_metrics(metrics, step)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Choose the folder, and write an empty file of hyperparameters until some are logged."""
        self._may_replace &= resumed_at is None
        super().begin_run(run_id, resumed_at)
        _write_none(self._folder.make() / self.hparams_file)

    def log_hyperparams(self, params: Any = None) -> None:
        """Write the hyperparameters as YAML."""
        if (writer := self.experiment) is self:
            write_hyperparameters(self._folder.make() / self.hparams_file, params)
        else:
            writer.log_hparams(loggers.as_mapping(params or {}))

    def save(self) -> None:
        """Write the rows that are held back."""
        super().save()
        if (writer := self.experiment) is not self:
            writer.save()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows that are held back, each with its step."""
        return [{"step": step, **values} for step, values in self._held]

    @property
    def metrics_file_path(self) -> str:
        """The file of the rows."""
        return str(self._file)


class ExperimentWriter:
    """Names of the files of a CSVLogger."""

    NAME_HPARAMS_FILE = CSVLogger.hparams_file
    NAME_METRICS_FILE = "metrics.csv"


class TensorBoardLogger(tensorboard_logger.TensorBoardLogger):
    """A TensorBoardLogger of the folder `lightning_logs`.

    A subclass may override the properties `name` and `version`, of which the folder is made.

    Args:
        save_dir, name, version, **options: of `stratagem.loggers.TensorBoardLogger`.
        root_dir: another name for `save_dir`, as Fabric has it.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = _NAME,
        version: int | str | None = None,
        *,
        root_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        folder = _one_folder(type(self).__name__, save_dir, root_dir)
        if type(self).version is not tensorboard_logger.TensorBoardLogger.version:
            version = self.version
        super().__init__(folder, name, version, **options)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Choose the folder, and write an empty file of hyperparameters until some are logged."""
        super().begin_run(run_id, resumed_at)
        _write_none(Path(self.log_dir) / self.NAME_HPARAMS_FILE)


def _write_none(file: Path) -> None:
    """Write a file of no hyperparameters where there is none: scripts pass it on unseen."""
    if not file.exists():
        write_hyperparameters(file, {})


class DummyLogger(loggers.Logger):
    """Stands for the loggers of a quick run: it takes every call, and writes nothing."""

    name = version = ""

    def __init__(self) -> None:
        self.experiment = DummyExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experiment, name)

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __iter__(self) -> Iterator[DummyLogger]:
        yield self


def rank_zero_experiment(experiment: Callable[..., Any]) -> Callable[..., Any]:
    """Let a logger's `experiment` be made on rank 0 only; elsewhere it takes every call.

    Args:
        experiment: the method, which a property is made of.

    Example:
        >>> class Mine(loggers.Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         self.experiment.append((step, dict(metrics)))
        ...     @property
        ...     @rank_zero_experiment
        ...     def experiment(self):
        ...         return vars(self).setdefault("rows", [])
        >>> logger = Mine()
        >>> logger.log_metrics({"loss": 0.5}, 3)
        >>> logger.experiment
        [(3, {'loss': 0.5})]
    """

    @functools.wraps(experiment)
    def of_rank(logger: Any) -> Any:
        return experiment(logger) if rank_zero_only.rank == 0 else DummyExperiment()

    return of_rank


class MLFlowLogger(mlflow_logger.MLFlowLogger):
    """An MLFlowLogger of the experiment `lightning_logs`.

    Args:
        experiment_name, *args, **options: of `stratagem.loggers.MLFlowLogger`.
    """

    def __init__(self, experiment_name: str = _NAME, *args: Any, **options: Any) -> None:
        super().__init__(experiment_name, *args, **options)


class WandbLogger(wandb_logger.WandbLogger):
    """A WandbLogger of the project `lightning_logs`.

    Args:
        *args, project, **options: of `stratagem.loggers.WandbLogger`.
    """

    default_project = _NAME


class CometLogger(comet_logger.CometLogger):
    """A CometLogger that takes the names of Lightning's older arguments.

    Args:
        project_name, experiment_name: `project` and `name` of `stratagem.loggers.CometLogger`.
        **options: the others.
    """

    def __init__(
        self,
        *,
        project_name: str | None = None,
        experiment_name: str | None = None,
        **options: Any,
    ) -> None:
        if project_name is not None:
            options["project"] = project_name
        if experiment_name is not None:
            options["name"] = experiment_name
        super().__init__(**options)
