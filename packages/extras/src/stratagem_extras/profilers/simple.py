"""SimpleProfiler: how often each action ran, and how long."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from stratagem.errors import UserCodeError
from stratagem.profilers import Profiler


class SimpleProfiler(Profiler):
    """Measures how long each action takes; an action within another counts for both.

    Args:
        dirpath, filename: as for `Profiler`.
        extended: also report the number of calls and each action's part of the run's time.

    Example:
        >>> from stratagem.profilers import SimpleProfiler
        >>> profiler = SimpleProfiler()
        >>> for _ in range(3):
        ...     with profiler.profile("tokenize"):
        ...         pass
        >>> len(profiler.recorded_durations["tokenize"])
        3
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        """The actions that run now, and when each began."""
        self.recorded_durations: dict[str, list[float]] = {}
        """Seconds of each call of each action, in all runs."""
        self._before: dict[str, int] = {}
        """Calls of each action before the present run."""
        self.start_time = perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin to count the run's time."""
        super().setup(stage, local_rank, log_dir)
        self.current_actions = {}
        self._before = {name: len(taken) for name, taken in self.recorded_durations.items()}
        self.start_time = perf_counter()

    def start(self, action_name: str) -> None:
        """Note when an action begins.

        Raises:
            UserCodeError: it runs already.
        """
        if action_name in self.current_actions:
            raise UserCodeError(
                f"the profiler was told that {action_name!r} begins, while it runs already: stop "
                "it first, or give what lies within it another name"
            )
        self.current_actions[action_name] = perf_counter()

    def stop(self, action_name: str) -> None:
        """Note how long it took.

        Raises:
            UserCodeError: it has not begun.
        """
        ended = perf_counter()
        if action_name not in self.current_actions:
            raise UserCodeError(
                f"the profiler was told that {action_name!r} ends, which has not begun: call "
                "start first, or use `with profiler.profile(...)`"
            )
        began = self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(ended - began)

    def summary(self) -> str:
        """Return a table of the present run's actions, the longest first."""
        durations = {
            name: taken[self._before.get(name, 0) :]
            for name, taken in self.recorded_durations.items()
        }
        rows = [
            (name, sum(taken) / len(taken), len(taken), sum(taken))
            for name, taken in durations.items()
            if taken
        ]
        if not rows:
            return ""
        total = perf_counter() - self.start_time
        rows.sort(key=lambda row: row[3], reverse=True)
        title = f"{self._stage.upper()} Profiler Report".strip()
        heads = ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
        calls = sum(row[2] for row in rows)
        lines = [["Total", "-", str(calls), f"{total:.5g}", "100 %"]]
        lines += [
            [name, f"{mean:.5g}", str(count), f"{spent:.5g}", f"{100 * spent / total:.5g}"]
            for name, mean, count, spent in rows
        ]
        if not self.extended:
            heads = [heads[0], heads[1], heads[3]]
            lines = [[line[0], line[1], line[3]] for line in lines[1:]]
        return f"{title}\n\n{_table([heads, *lines])}\n"


def _table(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "-" * len(texts[0])
    return "\n".join([rule, texts[0], rule, *texts[1:], rule])
