"""LogBuffer: the buffer between logged values and the loggers."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from torch import Tensor

from stratagem.interfaces.accelerator import Accelerator
from stratagem.loggers.logger import Logger

_MOST = 256
_SECONDS = 2.0
"""Rows go to the loggers when there are so many, or after this time."""


class LogBuffer:
    """Buffers rows of values, and sends many of them to the loggers at a time.

    Tensors are read only when rows are sent, all at once. Tensors on a device are copied beside its
    computation, and sent together with the next rows: no step waits for a device.

    A value that was logged as "step" becomes the step of the row: the axis of the user's charts.
    Loggers with an `optimizer_step_name` also receive the optimizer step of such a row.

    Args:
        loggers: receive the rows; empty on ranks other than 0.
        accelerator: reads tensors on its devices.
    """

    def __init__(self, loggers: Sequence[Logger], accelerator: Accelerator) -> None:
        self._loggers = loggers
        self._accelerator = accelerator
        self._rows: list[_Row] = []
        self._copied: _Copied | None = None
        """Rows whose values are on their way from a device."""
        self._due = monotonic() + _SECONDS
        self._failed: list[Logger] = []

    def add(self, row: dict[str, Any], step: int, epoch: int) -> None:
        """Add a row of values, its optimizer step, counted from 0, and the number of its epoch."""
        if not self._loggers:
            return
        row.setdefault("epoch", epoch)
        self._rows.append((step, row))
        if len(self._rows) >= _MOST or monotonic() >= self._due:
            self._send()

    def write(self, values: Mapping[str, Any], step: int, epoch: int) -> None:
        """Send an epoch's values to the loggers at once, after the rows in the buffer."""
        if self._loggers and values:
            self._rows.append((step, {**values, "epoch": values.get("epoch", epoch)}))
        self.flush()

    def flush(self) -> None:
        """Send the rows to the loggers; waits for pending values."""
        self._send()
        self._emit()

    def drop_device_values(self) -> None:
        """Drop values on a failed device, since reading them may block forever.

        A copy that is under way stays in memory for good: torch ends the process if it frees pinned
        memory that a failed device has used.
        """
        copied, self._copied = self._copied, None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(copied))
        kept = ([] if copied is None else copied.rows) + self._rows
        self._rows = [
            (step, {k: v for k, v in row.items() if not isinstance(v, Tensor) or v.is_cpu})
            for step, row in kept
        ]

    def _send(self) -> None:
        """Let the values of the rows leave the device, and hand over those that left before."""
        self._due = monotonic() + _SECONDS
        self._emit()
        rows, self._rows = self._rows, []
        if rows:
            self._copied = self._copy(rows)
            if self._copied.read is None:
                self._emit()

    def _copy(self, rows: list[_Row]) -> _Copied:
        """Begin to copy the tensors in rows to the host; what is there already is read."""
        places = []
        for _, row in rows:
            for name, value in row.items():
                if value.__class__ is not Tensor:
                    continue
                if value.is_cpu:  # an epoch's, among steps' values on a device
                    row[name] = value.item()
                else:
                    places.append((row, name))
        if not places:
            return _Copied(rows, places, None)
        on_device = [row[name] for row, name in places]
        return _Copied(rows, places, self._accelerator.start_reading(on_device))

    def _emit(self) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            return
        if copied.read is not None:
            for (row, name), number in zip(copied.places, copied.read(), strict=True):
                row[name] = number
        for logger in self._loggers:
            column = logger.optimizer_step_name
            rows = [_as_given(step, values, column) for step, values in copied.rows]
            self.attempt(logger, partial(logger.log_rows, rows))

    def attempt(self, logger: Logger, write: Callable[[], object]) -> None:
        """Call a logger's write; on OSError, warn once for each logger.

        A run that trains for days does not end because of a chart. The logger is tried again with
        the next rows.
        """
        try:
            write()
        except OSError as error:
            if logger not in self._failed:
                self._failed.append(logger)
                place = error.filename or logger.log_dir or "its values"
                warnings.warn(
                    f"{type(logger).__name__} cannot write {str(place)!r} ({type(error).__name__}: "
                    f"{error.strerror or error}): training goes on, and values are missing there "
                    "until it can",
                    stacklevel=2,
                )


_Row = tuple[int, dict[str, Any]]


def _as_given(step: int, values: dict[str, Any], column: str | None) -> _Row:
    """Return a row as a logger receives it: with its value "step", if it has one, as its step.

    Args:
        step: the optimizer step of the row.
        values: the values of the row.
        column: the logger's `optimizer_step_name`.
    """
    if "step" not in values and column not in values:
        return step, values
    given = dict(values) if column is None else {**values, column: step}
    axis = given.pop("step", step)
    try:
        return int(axis), given
    except (OverflowError, ValueError):
        warnings.warn(
            f"self.log('step', {axis}): expected a finite number, the step of the values in this "
            f"row; they are logged at the optimizer step {step}",
            stacklevel=2,
        )
        return step, given


class _Copied(NamedTuple):
    """Rows, and a function that reads the tensors in them from a device."""

    rows: list[_Row]
    places: list[tuple[dict[str, Any], str]]
    read: Callable[[], list[float]] | None
