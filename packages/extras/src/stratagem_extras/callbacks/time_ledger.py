"""TimeLedger: the seconds of a run by activity, over all restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

from stratagem import storage

KINDS = {
    "training": "training steps that count",
    "starting": "starting",
    "data": "waiting for data",
    "validation": "validating",
    "saving": "saving checkpoints",
    "repeated": "steps trained again after a restart",
    "down": "between two attempts",
    "other": "the rest",
}
"""The activities, by the name of their value in a log."""


class TimeLedger:
    """The seconds that a run has spent on each of `KINDS`.

    The time since the last call of `enter` belongs to one kind. So the sum of all kinds is the time
    since the start.

    Args:
        since: the start, by `time.perf_counter`.

    Attributes:
        seconds: the seconds by kind, without the seconds since the last call of `enter`.
        restarts: the number of times that the run was resumed.

    Example:
        >>> from stratagem_extras.callbacks.time_ledger import TimeLedger
        >>> ledger = TimeLedger(0.0)
        >>> ledger.enter("training", now=2.0), ledger.enter("other", now=8.0)
        ('starting', 'training')
        >>> ledger.goodput()
        0.75
    """

    def __init__(self, since: float) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.restarts = 0
        self._kind, self._since = "starting", since

    def enter(self, kind: str, now: float | None = None) -> str:
        """Let the time from now on belong to a kind; return the kind that it belonged to."""
        now = perf_counter() if now is None else now
        before, self._kind = self._kind, kind
        self.seconds[before] += now - self._since
        self._since = now
        return before

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of one kind as another one, at most all of them."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def update(self) -> None:
        """Count the time until now."""
        self.enter(self._kind)

    @property
    def whole(self) -> float:
        """The seconds since the first start of the run."""
        return sum(self.seconds.values())

    def goodput(self) -> float:
        """Return the part of the time that steps took which count."""
        return self.seconds["training"] / (self.whole or 1.0)

    def resume(self, saved: Attempt, last: Attempt | None, began: float) -> None:
        """Add the time of the attempts that this one continues.

        Args:
            saved: the attempt that saved the checkpoint, at that time.
            last: the last attempt at its end, if known.
            began: the time of the start of this attempt, as `time.time` returns it.
        """
        spent = dict((last or saved).seconds)
        lost = max(0.0, spent["training"] - saved.seconds["training"])
        spent["training"] -= lost
        spent["repeated"] += lost
        if last is not None and last.ended != "finished":
            spent["down"] += max(0.0, began - last.at)
        for kind, seconds in spent.items():
            self.seconds[kind] += seconds
        self.restarts = (last or saved).restarts + 1

    def sentence(self) -> str:
        """Return a sentence for a reader."""
        shares = {kind: each / (self.whole or 1.0) for kind, each in self.seconds.items()}
        others = [f"{KINDS[kind]} {share:.1%}" for kind, share in shares.items() if share >= 0.0005]
        times = f", with {self.restarts} restart" + "s" * (self.restarts > 1)
        return (
            f"goodput {self.goodput():.1%} of {duration(self.whole)}"
            f"{times if self.restarts else ''}: {', '.join(others)}"
        )


@dataclass
class Attempt:
    """The state of a ledger at some time, for a checkpoint and for the file of a run.

    Attributes:
        run: the ID of the run.
        seconds: the seconds by kind, of this attempt and the attempts before it.
        at: the time, as `time.time` returns it.
        ended: "running", "failed" or "finished".
        restarts: the number of times that the run was resumed.
    """

    run: str = ""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    at: float = 0.0
    ended: str = "running"
    restarts: int = 0

    @classmethod
    def of(cls, ledger: TimeLedger, run: str, ended: str) -> Attempt:
        """Return the present state of a ledger."""
        return cls(run, dict(ledger.seconds), time.time(), ended, ledger.restarts)

    @classmethod
    def from_data(cls, data: Any) -> Attempt | None:
        """Return an attempt from `data()`, or None if the data have another form."""
        with suppress(TypeError, ValueError, KeyError):
            given: Mapping[str, float] = data["seconds"]
            seconds = {kind: float(given[kind]) for kind in KINDS}
            whole = int(data["restarts"])
            return cls(str(data["run"]), seconds, float(data["at"]), str(data["ended"]), whole)
        return None

    def data(self) -> dict[str, Any]:
        """Return the attempt as plain data."""
        return asdict(self)


def read_attempt(place: storage.Location, run: str) -> Attempt | None:
    """Return the attempt in a file, if it belongs to this run."""
    with suppress(OSError, ValueError):
        attempt = Attempt.from_data(json.loads(storage.read(place)))
        return attempt if attempt is not None and attempt.run == run else None
    return None


def duration(seconds: float) -> str:
    """Return a time for a reader.

    Example:
        >>> duration(12.34), duration(4000)
        ('12.3 s', '1:06:40')
    """
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
