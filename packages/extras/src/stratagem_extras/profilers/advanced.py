"""AdvancedProfiler: which functions each action spends its time in, by cProfile."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from stratagem.errors import UserCodeError
from stratagem.profilers import Profiler

_Path = tuple[str, ...]
"""The actions that run, from the outermost one."""


class AdvancedProfiler(Profiler):
    """Measures by cProfile which functions each action spends its time in.

    The time of an action includes the time of actions inside it.

    Args:
        dirpath, filename: as for `Profiler`.
        line_count_restriction: the part of each action's table to print: a number of lines (int),
            or a fraction of them (float).
        dump_stats: also write each action's numbers to a file `STAGE-ACTION-FILENAME.prof`
            that pstats and its viewers read.

    Example:
        >>> from stratagem.profilers import AdvancedProfiler
        >>> profiler = AdvancedProfiler(line_count_restriction=5)
        >>> with profiler.profile("sort"):
        ...     _ = sorted(range(10))
        >>> "built-in method builtins.sorted" in profiler.summary()
        True
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._running: _Path = ()
        # One for each chain of actions: only one profile of a thread can be enabled at a time.
        self._profiles: dict[_Path, cProfile.Profile] = {}

    def start(self, action_name: str) -> None:
        """Attribute the calls from this moment on to an action."""
        if self._running:
            self._profiles[self._running].disable()
        self._running += (action_name,)
        self._profiles.setdefault(self._running, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """Attribute the calls from this moment on to the enclosing action.

        Raises:
            UserCodeError: the action has not begun.
        """
        if action_name not in self._running:
            raise UserCodeError(
                f"the profiler was told that {action_name!r} ends, which has not begun: call "
                "start first, or use `with profiler.profile(...)`"
            )
        self._profiles[self._running].disable()
        # One that an error has left within it ends with it.
        last = len(self._running) - 1 - self._running[::-1].index(action_name)
        self._running = self._running[:last]
        if self._running:
            self._profiles[self._running].enable()

    @property
    def profiled_actions(self) -> dict[str, cProfile.Profile]:
        """The profile of each action: of one that ran within several others, the newest of them."""
        return {path[-1]: profile for path, profile in self._profiles.items()}

    def stats(self) -> dict[str, pstats.Stats]:
        """Return the measurements of each action."""
        found: dict[str, pstats.Stats] = {}
        for path, profile in self._profiles.items():
            profile.create_stats()
            if not profile.stats:
                continue
            for action in set(path):
                if action in found:
                    found[action].add(profile)
                else:
                    found[action] = pstats.Stats(profile)
        return found

    def summary(self) -> str:
        """Return a table of functions for each action, the longest first."""
        if self._running:
            self._profiles[self._running].disable()
        actions = self.stats()
        if not actions:
            return ""
        title = f"{self._stage.upper()} Profiler Report".strip()
        parts = [f"{title}\n"]
        for action, stats in actions.items():
            text = io.StringIO()
            stats.stream = text  # type: ignore[attr-defined]  # typeshed leaves it out
            stats.strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
            parts.append(f"Profile stats for: {action}\n{text.getvalue().strip()}\n")
        return "\n".join(parts)

    def describe(self) -> None:
        """Report, and write the files of each action if requested."""
        super().describe()
        if self.dump_stats:
            for action, stats in self.stats().items():
                name = "".join(c if c.isalnum() or c in "._" else "_" for c in action)
                path = self.path_of(".prof", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                stats.dump_stats(path)

    def teardown(self, stage: str | None = None) -> None:
        """Forget the measurements."""
        self._running = ()
        self._profiles = {}
