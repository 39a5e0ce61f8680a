"""Displays of progress: on a terminal, in a notebook, or as lines of a log."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from stratagem.launch.process import printable
from stratagem.plan.plan import is_interactive

if TYPE_CHECKING:
    from rich.console import Console


_NAME = 12
"""The minimum width of a row's name, in columns of the terminal."""
_BAR = 4, 20
"""The minimum and maximum width of the bar, in columns."""


@dataclass
class Row:
    """The progress of an epoch or an evaluation.

    Args:
        what: the name, for example "epoch 0/2".
        total: the number of batches; infinity if unknown.
        done: the number of batches done.
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


class Terminal(Display):
    """Bars on a terminal, drawn by rich, which is imported only here.

    On a narrow terminal the bar is shortened first, then the end of the text is replaced by "…".
    The name of the row is always shown.
    """

    def __init__(self, interval: float, console: Console | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self.interval = interval
        name = Column(min_width=_NAME, no_wrap=True)
        self._bar = BarColumn(bar_width=_BAR[1])
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            self._bar,
            # Do not read brackets in a name as rich's markup.
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            auto_refresh=False,
        )
        self._tasks: dict[int, Any] = {}
        self._rows: dict[int, str] = {}
        """The last text of each row, in full."""
        self._progress.start()

    def _text(self, text: str) -> str:
        return printable(text, self._progress.console.encoding)

    def begin(self, row: Row) -> None:
        """Add a bar."""
        total = None if row.total == float("inf") else row.total
        self._tasks[id(row)] = self._progress.add_task(row.what, total=total, text="")

    def update(self, row: Row) -> None:
        """Set the bar; the next refresh draws it."""
        self._rows[id(row)] = self._text(row.text())
        names = [len(task.description) for task in self._progress.tasks]
        room = self._progress.console.width - max(_NAME, *names) - 2
        longest = max(len(text) for text in self._rows.values())
        self._bar.bar_width = min(max(room - longest, _BAR[0]), _BAR[1])
        text = self._rows[id(row)]
        if len(text) > (most := max(room - self._bar.bar_width, 1)):
            text = self._text(f"{text[: most - 1]}…")
        self._progress.update(self._tasks[id(row)], completed=row.done, text=text)

    def refresh(self, row: Row) -> None:
        """Draw all bars."""
        self.update(row)
        self._progress.refresh()

    def end(self, row: Row, *, leave: bool) -> None:
        """Remove the bar; with `leave`, its line stays above the others."""
        self._progress.remove_task(self._tasks.pop(id(row)))
        self._rows.pop(id(row), None)
        self._progress.refresh()
        if leave:
            self.say(f"{row.what}  {row.text()}")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(
            self._text(text), markup=False, highlight=False, soft_wrap=True
        )

    def close(self) -> None:
        """Release the terminal."""
        self._progress.stop()


class Lines(Display):
    """Lines of text.

    Args:
        interval: the time between two lines of a row, in seconds.
        stream: the stream to write to.
        rewrites: whether to overwrite a single line, as in a notebook.
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
        text = printable(text, getattr(self._stream, "encoding", None))
        start = "\r" if self._width else ""
        # Overwrite the rest of a longer line.
        self._stream.write(start + text.ljust(self._width) + ("\n" if stays else ""))
        self._stream.flush()
        self._width = 0 if stays else len(text)


def display_here(refresh_seconds: float, line_seconds: float, console: Console | None) -> Display:
    """Return the display for this process.

    Args:
        refresh_seconds: the time between two refreshes of a terminal or a notebook.
        line_seconds: the time between two lines of a log.
        console: a rich console for the output.
    """
    if console is not None or sys.stdout.isatty():
        return Terminal(refresh_seconds, console)
    if is_interactive():
        return Lines(max(refresh_seconds, 0.5), sys.stdout, rewrites=True)
    return Lines(line_seconds, sys.stderr)
