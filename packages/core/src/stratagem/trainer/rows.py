"""Rows: the one buffer between logged values and the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from torch import Tensor

from stratagem.interfaces.accelerator import Accelerator
from stratagem.loggers.logger import Logger

_MOST = 256
_SECONDS = 2.0
"""Rows are handed to the loggers when there are so many, or when this time has gone by."""


class Rows:
    """Keeps rows of values and hands them to the loggers, many at a time.

    Tensors in them are read only then, all at once, so that no step waits for a device.

    Args:
        loggers: receive the rows; none on ranks other than 0.
        accelerator: reads tensors on its devices.
    """

    def __init__(self, loggers: Sequence[Logger], accelerator: Accelerator) -> None:
        self._loggers = loggers
        self._accelerator = accelerator
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._due = monotonic() + _SECONDS

    def add(self, row: dict[str, Any], step: int) -> None:
        """Add the values of one step, counted from 0."""
        if not self._loggers:
            return
        self._rows.append((step, row))
        if len(self._rows) >= _MOST or monotonic() >= self._due:
            self.flush()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Hand a row to the loggers at once, after those that are kept."""
        if self._loggers and row:
            self._rows.append((step, dict(row)))
            self.flush()

    def flush(self) -> None:
        """Hand the rows to the loggers."""
        self._due = monotonic() + _SECONDS
        rows, self._rows = self._rows, []
        if rows:
            self._read_tensors([row for _, row in rows])
            for logger in self._loggers:
                logger.log_rows(rows)

    def _read_tensors(self, rows: list[dict[str, Any]]) -> None:
        """Put numbers in the place of tensors, reading the device once for all of them."""
        places = []
        for row in rows:
            for name, value in row.items():
                if value.__class__ is not Tensor:
                    continue
                if value.is_cpu:  # an epoch's, among steps' values on a device
                    row[name] = value.item()
                else:
                    places.append((row, name))
        if places:
            numbers = self._accelerator.read_numbers([row[name] for row, name in places])
            for (row, name), number in zip(places, numbers, strict=True):
                row[name] = number
