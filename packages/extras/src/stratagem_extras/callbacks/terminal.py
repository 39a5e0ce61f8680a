"""TerminalDisplay: the bars of `ProgressBar` on a terminal, drawn by rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from stratagem.callbacks import Display, Row
from stratagem.launch import printable

_NAME = 12
"""The minimum width of a row's name, in columns of the terminal."""
_BAR = 4, 20
"""The minimum and maximum width of the bar, in columns."""


class TerminalDisplay(Display):
    """Bars on a terminal, drawn by rich.

    On a narrow terminal the bar is shortened first, then the end of the text is replaced by "…".
    The name of the row is always shown.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from stratagem.callbacks import TerminalDisplay
        >>> TerminalDisplay(0.5, Console(file=io.StringIO())).interval
        0.5
    """

    def __init__(self, interval: float, console: Console | None) -> None:
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
