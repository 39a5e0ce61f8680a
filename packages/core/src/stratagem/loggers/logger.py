"""Logger: where logged values and hyperparameters go."""

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
        0. `save_dir` before processes start; `on_rank_zero` is set, on every rank.
        1. `begin_run` when a fit begins, then `log_dir`.
        2. `log_hyperparams`, once, if the Module has hyperparameters, and `log_graph`.
        3. `log_rows` with the rows of the last steps, every two seconds or every 256 rows, and at
           the end of each epoch. By default it calls `log_metrics` for each of them, in the order
           of steps (an evaluation's batches are numbered from 0), and then `save`.
        4. `after_save_checkpoint` once a checkpoint of a ModelCheckpoint is durable.
        5. `finalize`, when the run ends, however it ends; all rows have come before.

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
    """The local folder that it writes into, which a Trainer tries before it starts processes; None:
    there is none to try."""
    name: str | None = None
    """Of the experiment, which holds many runs; None: it has none."""
    version: int | str | None = None
    """Of the run; None: it has none."""
    experiment: Any = None
    """What the logger's library writes through, for whatever it can do beyond values, such as
    pictures; on ranks other than 0 an object that takes every call. None: there is none."""
    on_rank_zero: bool | None = None
    """Whether this process is the one that writes; None: nobody has said."""
    steps_taken: int = 0
    """Optimizer steps of the run so far; a Trainer sets it before `finalize`."""

    @property
    def log_dir(self) -> str:
        """The folder of this run, by default `save_dir`; "": it has none, as where values are sent.

        A Trainer puts checkpoints beside it, or else into its `default_root_dir`.
        """
        return "" if self.save_dir is None else str(self.save_dir)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Choose where this run's values go; one that is resumed goes on in its own place.

        Args:
            run_id: of the fit, 16 hexadecimal digits (what else a checkpoint may say is not handed
                on); a fit that resumes it has the same.
            resumed_at: optimizer steps that were taken before it was resumed; None: it is new.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take the values of one step (an optimizer step, counted from 0)."""

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Take the values of several steps, each as (step, values), and write them.

        Every row goes through `log_metrics`, which a subclass may override.
        """
        for step, metrics in rows:
            # A copy: another logger reads the same row, and this one may take values out of it.
            self.log_metrics(dict(metrics), step)
        self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Take the hyperparameters."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Take the graph of a model; `input_array`: None: its `example_input_array`."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Take what a ModelCheckpoint has just saved."""

    def save(self) -> None:
        """Write what is held back."""

    def finalize(self, status: str) -> None:
        """Write everything and close; `status` is "success" or "failed"."""


def as_mapping(params: Any) -> dict[Any, Any]:
    """Return hyperparameters as a dict of their own, whatever holds them.

    Args:
        params: a mapping, an argparse.Namespace or a dataclass; None: there are none.

    Raises:
        ConfigurationError: it is something else.

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
    """Return nested hyperparameters of dicts, lists, texts, numbers and None; of others the text.

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
    """Return the number that a scalar of NumPy or torch is, or None."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else None
    return number if isinstance(number, (bool, int, float)) else None
