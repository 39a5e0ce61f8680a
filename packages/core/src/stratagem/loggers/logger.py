"""Logger: the interface of loggers, which receive logged values and hyperparameters."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.callbacks import ModelCheckpoint


class Logger(ABC):
    """Receives values, on rank 0.

    Call sequence:
        0. `save_dir` is read before processes start; `on_rank_zero` is set on every rank.
        1. `begin_run` when a fit begins, then `log_dir`. If the fit resumes "best" or "last", which
           may be in a folder beside `log_dir`, `begin_run` comes again with the run that is found.
        2. `log_hyperparams`, once, if the Module has hyperparameters, and `log_graph`.
        3. `log_rows` with the rows of the last steps, every two seconds or every 256 rows, at the
           end of each epoch and validation, and before each checkpoint. By default it calls
           `log_metrics` for each row, in the order of steps (an evaluation's batches are numbered
           from 0, through all evaluations of a run), and then `save`.
        4. `after_save_checkpoint` once a checkpoint of a ModelCheckpoint is durable.
        5. `finalize` when the run ends for any reason, after all rows.

    Example:
        >>> from stratagem import Lite
        >>> from stratagem.loggers import Logger
        >>> class Printing(Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> Lite(accelerator="cpu", loggers=Printing()).log_dict({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
    """

    save_dir: str | Path | None = None
    """The local folder that the logger writes into. A Trainer checks that it is writable before
    processes start. None: the logger has no local folder."""
    name: str | None = None
    """The name of the experiment, which contains many runs; None: no name."""
    version: int | str | None = None
    """The version of the run; None: no version."""
    experiment: Any = None
    """The object of the logger's library, for other data than values, such as pictures. On ranks
    other than 0 it is an object that accepts every call. None: the logger has no such object."""
    on_rank_zero: bool | None = None
    """Whether this process is rank 0, which writes; None: not set yet."""
    optimizer_step_name: str | None = None
    """The name under which a row that has another step also has the optimizer step, counted from 0:
    a row of an evaluation's batch, or one with a value "step". None: such rows do not have it."""
    steps_taken: int = 0
    """Optimizer steps of the run so far; a Trainer sets it before `finalize`."""

    @property
    def log_dir(self) -> str:
        """The folder of this run, by default `save_dir`; "": the logger has no folder.

        A logger that sends values to a service has no folder. A Trainer saves checkpoints beside
        this folder, or without a folder in its `default_root_dir`.
        """
        return "" if self.save_dir is None else str(self.save_dir)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Choose the destination of this run's values; a resumed run keeps its destination.

        Args:
            run_id: the id of the fit, 16 hexadecimal digits. A resumed fit has the same id. An id
                of another form in a checkpoint is not passed on.
            resumed_at: optimizer steps taken before the run was resumed; None: the run is new.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the values of a step (an optimizer step, counted from 0)."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log and write the values of several steps, each as (step, values).

        Every row goes through `log_metrics`, which a subclass may override.
        """
        for step, metrics in rows:
            # A copy: other loggers read the same row, and this logger may remove values from it.
            self.log_metrics(dict(metrics), step)
        self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the hyperparameters."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Log the graph of a model.

        Args:
            model: the model.
            input_array: an input of the model; None: its `example_input_array`.
        """

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Process a checkpoint that a ModelCheckpoint has just saved."""

    def save(self) -> None:
        """Write buffered values."""

    def finalize(self, status: str) -> None:
        """Write everything and close; `status` is "success" or "failed"."""


def as_mapping(params: Any) -> dict[Any, Any]:
    """Return hyperparameters as a new dict.

    Args:
        params: a mapping, an argparse.Namespace or a dataclass; None: no hyperparameters.

    Raises:
        ConfigurationError: `params` has another type.

    Example:
        >>> as_mapping(Namespace(rate=0.1))
        {'rate': 0.1}
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    if isinstance(params, Namespace):
        return dict(vars(params))
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    raise ConfigurationError(
        f"log_hyperparams({params!r:.80}): expected a dict, an argparse.Namespace or a dataclass, "
        f"received a {type(params).__name__}"
    )


def as_plain(value: Any) -> Any:
    """Convert nested hyperparameters to dicts, lists, strings and numbers.

    None is kept, and other values are converted to strings.

    Example:
        >>> import torch
        >>> as_plain({"sizes": (1, 2), 7: Namespace(dtype=torch.float32)})
        {'sizes': [1, 2], '7': {'dtype': 'torch.float32'}}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Mapping, Namespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return {str(key): as_plain(held) for key, held in as_mapping(value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(held) for held in value]
    number = _number(value)
    return str(value) if number is None else number


def _number(value: Any) -> bool | int | float | None:
    """Return the number in a scalar of NumPy or torch.

    None: the value is not a scalar.
    """
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else None
    return number if isinstance(number, (bool, int, float)) else None
