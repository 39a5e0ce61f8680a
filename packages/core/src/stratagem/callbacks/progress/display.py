"""Displays of progress: on a terminal, in a notebook, or as lines of a log."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from shutil import get_terminal_size
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from stratagem.launch.process import printable
from stratagem.plan.plan import is_interactive

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Row:
    """The progress of an epoch or an evaluation.

    Args:
        what: the name, for example "epoch 0/2".
        total: the number of batches; infinity if unknown.
        done: the number of batches done.

    Example:
        >>> from stratagem.callbacks import Row
        >>> Row("epoch 0/2", total=10, done=5).done
        5
    """

    what: str
    total: float
    done: int = 0
    values: str = ""
    """The values to show beside the progress."""
    began: float = field(default_factory=monotonic)
    first: int = field(init=False)
    """The number of batches done before the start, if the epoch was resumed."""

    def __post_init__(self) -> None:
        self.first = self.done

    def text(self) -> str:
        """Return batches, speed and times, and the values.

        Example:
            >>> from stratagem.callbacks.progress.display import Row
            >>> Row("epoch 0/2", total=40, values="loss 0.5").text()
            '0/40  -- it/s  elapsed 0:00  loss 0.5'
        """
        elapsed = monotonic() - self.began
        speed = (self.done - self.first) / elapsed if elapsed > 0 else 0.0
        count = str(self.done) if self.total == float("inf") else f"{self.done}/{int(self.total)}"
        parts = [count, f"{speed:.1f} it/s" if speed else "-- it/s", f"elapsed {_clock(elapsed)}"]
        if self.done < self.total < float("inf") and speed:
            parts.append(f"left {_clock((self.total - self.done) / speed)}")
        return "  ".join([*parts, self.values] if self.values else parts)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Display(ABC):
    """Shows rows; the row that began last is the active one.

    Attributes:
        interval: the time between two refreshes, in seconds.

    Example:
        >>> from stratagem.callbacks import Display, Row
        >>> class Count(Display):
        ...     interval = 1.0
        ...     done = 0
        ...     def update(self, row):
        ...         self.done = row.done
        >>> Display in Count.__mro__
        True
    """

    interval: float

    def begin(self, row: Row) -> None:
        """Show one more row."""

    def update(self, row: Row) -> None:
        """Store a row's progress for the next refresh."""

    @abstractmethod
    def refresh(self, row: Row) -> None:
        """Show the progress of a row."""

    @abstractmethod
    def end(self, row: Row, *, leave: bool) -> None:
        """Remove a row; with `leave`, leave a line for it."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line that stays."""

    @abstractmethod
    def close(self) -> None:
        """End the display, without clearing it."""


class Lines(Display):
    """Lines of text.

    Args:
        interval: the time between two lines of a row, in seconds.
        stream: the stream to write to.
        rewrites: whether to overwrite a single line, as in a notebook or on a terminal.
    """

    def __init__(self, interval: float, stream: TextIO, *, rewrites: bool = False) -> None:
        self.interval = interval
        self._stream = stream
        self._rewrites = rewrites
        self._width = 0

    def refresh(self, row: Row) -> None:
        """Write a line."""
        self._write(f"{row.what}  {row.text()}", stays=not self._rewrites)

    def end(self, row: Row, *, leave: bool) -> None:
        """With `leave`, write a line that stays."""
        if leave:
            self._write(f"{row.what}  {row.text()}", stays=True)

    def say(self, text: str) -> None:
        """Write a line."""
        self._write(text, stays=True)

    def close(self) -> None:
        """End the line."""
        if self._width:
            self._write("", stays=True)

    def _write(self, text: str, *, stays: bool) -> None:
        if not stays and self._stream.isatty():
            columns = get_terminal_size().columns - 1  # a line that wraps cannot be overwritten
            text = text if len(text) <= columns else f"{text[: columns - 1]}…"
        text = printable(text, getattr(self._stream, "encoding", None))
        start = "\r" if self._width else ""
        # Overwrite the rest of a longer line.
        self._stream.write(start + text.ljust(self._width) + ("\n" if stays else ""))
        self._stream.flush()
        self._width = 0 if stays else len(text)


def display_here(refresh_seconds: float, line_seconds: float, console: Console | None) -> Display:
    """Return the display for this process.

    On a terminal, stratagem-extras provides the bars. Without it, a line is overwritten.

    Args:
        refresh_seconds: the time between two refreshes of a terminal or a notebook.
        line_seconds: the time between two lines of a log.
        console: a rich console for the output.

    Raises:
        ImportError: `console` was passed, and stratagem-extras is missing.
    """
    is_terminal = sys.stdout.isatty()
    if console is not None or is_terminal:
        try:
            from stratagem.callbacks import TerminalDisplay
        except ImportError:
            if console is not None:
                raise
        else:
            bars: Display = TerminalDisplay(refresh_seconds, console)
            return bars
    if is_terminal or is_interactive():
        return Lines(max(refresh_seconds, 0.5), sys.stdout, rewrites=True)
    return Lines(line_seconds, sys.stderr)
