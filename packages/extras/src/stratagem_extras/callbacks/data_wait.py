"""DataWait: how long an epoch waits for its batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

_MOST = 0.5
"""The part of the time from which the wait is most of it."""
_FEW_BATCHES = 8
_SHORT = 0.5
"""Seconds of waiting that nobody needs to shorten."""
_LONG_READ = 1e-3
"""Seconds of a read after which the idle time of a device is measured."""


class DataWait:
    """Measures how long the batches of an epoch are waited for.

    The time begins with the first batch, since its read starts workers, and ends with the last. On
    a CPU the wait is the time of the reads. Other devices compute during a read, so the wait is
    their idle time by events, which are read only once they have passed. So the loop never waits
    for the device, and the measured wait is never too long.

    Args:
        device: the device that trains.

    Attributes:
        waited: the seconds of waiting.
        waited_before: the value of `waited` before the last read.
        batches: the number of batches.

    Example:
        >>> import torch
        >>> from stratagem_extras.callbacks.data_wait import DataWait
        >>> wait = DataWait(torch.device("cpu"))
        >>> list(wait.reads(iter([1, 2]))), wait.batches, wait.is_most
        ([1, 2], 2, False)
    """

    def __init__(self, device: torch.device) -> None:
        self.waited = self.waited_before = 0.0
        self.batches = 0
        self._events = None if device.type == "cpu" else _IdleTime(device)
        self._first = self._last = 0.0

    @property
    def whole(self) -> float:
        """The seconds from the first batch to the last."""
        return self._last - self._first

    @property
    def is_most(self) -> bool:
        """Whether the wait is most of the time, and long enough to be worth a change."""
        is_long = self.waited >= _SHORT and self.batches >= _FEW_BATCHES
        return is_long and self.waited > _MOST * self.whole

    def reads(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the batches that measures each read."""
        return _TimedReads(batches, self, self._events)

    def count(self, began: float, ended: float, idle: float | None) -> None:
        """Count a read.

        Args:
            began: the time of its begin.
            ended: the time of its end.
            idle: the idle time of the device in seconds. None: the duration of the read is the
                wait.
        """
        self._last, self.waited_before = ended, self.waited
        self.batches += 1
        if self.batches == 1:
            self._first = ended
        else:
            self.waited += ended - began if idle is None else idle


class _TimedReads(Iterator[Any]):
    """An iterator of measured reads, which holds no batch."""

    def __init__(self, batches: Iterator[Any], wait: DataWait, events: _IdleTime | None) -> None:
        self._batches = batches
        self._wait = wait
        self._events = events

    def __next__(self) -> Any:
        events = self._events
        idle = None if events is None else events.begin()
        began = perf_counter()
        batch = next(self._batches)
        ended = perf_counter()
        self._wait.count(began, ended, idle)
        if events is not None and self._wait.batches > 1 and ended - began >= _LONG_READ:
            events.end()
        return batch


class _IdleTime:
    """The idle time of a device during the reads of batches.

    Args:
        device: the device; a device without events has no idle time here.
    """

    def __init__(self, device: torch.device) -> None:
        self._pair: tuple[torch.Event, torch.Event] | None = None
        with suppress(RuntimeError):
            self._pair = (
                torch.Event(device, enable_timing=True),
                torch.Event(device, enable_timing=True),
            )
        self._is_recorded = False
        """Whether both events of the pair are recorded, and not read yet."""

    def begin(self) -> float:
        """Mark the end of the device's present work; return the idle seconds of the last read."""
        if self._pair is None:
            return 0.0
        (begin, end), idle = self._pair, 0.0
        try:
            if self._is_recorded and end.query():
                idle, self._is_recorded = float(begin.elapsed_time(end)) / 1000, False
            if not self._is_recorded:
                begin.record()
        except RuntimeError:
            self._pair = None  # the device has no such events
        return idle

    def end(self) -> None:
        """Mark the end of a read, before the device is given further work."""
        if self._pair is not None and not self._is_recorded:
            self._pair[1].record()
            self._is_recorded = True
