"""Scenarios: each breaks something while a child saves, and has judged what is left."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stratagem_testing.child import Child, Report, StuckError
from stratagem_testing.durability import faults
from stratagem_testing.durability.judge import judge
from stratagem_testing.durability.saver import Subject, save_for_ever, save_on_two_ranks, save_twice


@dataclass
class Row:
    """The result of a scenario.

    Attributes:
        subject: the format under test.
        scenario: the name of the scenario.
        runs: the number of runs.
        in_a_save: the number of runs in which a save had begun and was not durable.
        new, old: the number of runs that found a checkpoint whose save had begun and was not
            durable (or the last checkpoint, if no save was running), and the number of runs that
            found the last durable checkpoint.
        wrong: descriptions of defects.
        note: the variant of the scenario, if the scenario has several.
    """

    subject: Subject
    scenario: str
    runs: int = 0
    in_a_save: int = 0
    new: int = 0
    old: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""


class Scenarios:
    """The scenarios for a subject.

    Args:
        directory: the parent folder of the checkpoints, with a subfolder for each run.
        environ: variables of the processes that save.
        seed: of all random moments.
    """

    def __init__(self, directory: Path, environ: dict[str, str], seed: int) -> None:
        self._directory = directory
        self._environ = environ
        self._chance = random.Random(seed)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._folders = 0

    def kill(self, subject: Subject, count: int, *, slow: bool = False) -> Row:
        """Kill -9 at random moments of a save, and between its steps on a slow disk."""
        row = Row(subject, "kill -9, slow disk" if slow else "kill -9")
        save = partial(_save_on_slow_disk, self._chance.random()) if slow else save_for_ever
        a_save = self._time_of_a_save(partial(save, subject))
        while row.in_a_save < count and row.runs < 5 * count:
            with self._folder() as folder:
                child = self._child(partial(save, subject, folder))
                durable = child.wait_for("durable")
                time.sleep(self._chance.uniform(0, 4 * a_save))
                self._judge(row, folder, child.end(), durable)
        return row

    def lose_rank(self, subject: Subject, count: int) -> Row:
        """Kill -9 a rank while two ranks save together."""
        row = Row(subject, "one of two ranks lost")
        for _ in range(count):
            with self._folder() as folder:
                child = self._child(partial(save_on_two_ranks, subject, folder))
                pids = [child.wait_for("pid") for _ in range(2)]
                durable = child.wait_for("durable")
                begin = time.monotonic()
                child.wait_for("durable")
                time.sleep(self._chance.uniform(0, 2 * (time.monotonic() - begin)))
                os.kill(self._chance.choice(pids), signal.SIGKILL)
                try:
                    while child.next_report() is not None:
                        pass
                except StuckError as error:
                    row.wrong.append(f"the other rank does not end: {error}")
                self._judge(row, folder, child.end(), durable)
        return row

    def fill_disk(self, subject: Subject, count: int) -> Row:
        """Save on a disk that has room for a checkpoint, but not for a second beside it."""
        row = Row(subject, "full disk", note="tmpfs")
        size = self._size_of_a_checkpoint(subject)
        for _ in range(count):
            room = int(size * self._chance.uniform(1.15, 1.85))
            room = min(room + (256 << 10), int(1.9 * size))  # a second one has no room
            with self._folder() as above, faults.small_disk(above / "disk", room) as mounted:
                if mounted:
                    self._break(row, above / "disk", faults.nothing_more)
                else:
                    row.note = "limit on a file's size: a mount is not permitted"
                    largest = int(size * self._chance.uniform(0.01, 0.5))
                    self._break(row, above / "disk", partial(faults.limit_file_size, largest))
        return row

    def fail_syncs(self, subject: Subject) -> Row:
        """Fail the first fsync of a save, then the second, until a save has no further one."""
        row = Row(subject, "failing fsync")
        for which in itertools.count(1):
            with self._folder() as folder:
                if not self._break(row, folder, partial(faults.fail_sync, which)):
                    return row
        raise AssertionError

    def forbid_writing(self, subject: Subject) -> Row:
        """Take away the right to write in the folder."""
        row = Row(subject, "read-only directory")
        with self._folder() as folder:
            self._break(row, folder, partial(faults.lose_right_to_write, folder))
        return row

    # -- shared methods

    def _break(self, row: Row, folder: Path, break_disk: faults.Break) -> bool:
        """Run a child that saves, breaks its disk, and saves; return whether something broke."""
        child = self._child(partial(save_twice, row.subject, folder, break_disk))
        reported: dict[str, Any] = {}
        while (more := child.next_report()) is not None:
            reported.update(more)
        child.end()
        folder.chmod(0o755)
        if "end" not in reported:
            row.wrong.append(f"the process that saved has crashed; it reported {reported}")
        elif "other" in reported:
            row.wrong.append(
                f"a save on a broken disk raised {reported['other']}, which is neither an OSError "
                "nor a CheckpointError: raise CheckpointError from the library's error"
            )
        elif reported["broke"] and "refused" not in reported:
            row.wrong.append("a save on a broken disk raised no error")
        self._judge(row, folder, [{"begun": 2}], 2 if "saved" in reported else 1)
        return bool(reported.get("broke"))

    def _judge(self, row: Row, folder: Path, reported: list[dict[str, Any]], durable: int) -> None:
        durable = max([durable, *(line["durable"] for line in reported if "durable" in line)])
        begun = max([durable, *(line["begun"] for line in reported if "begun" in line)])
        row.runs += 1
        row.in_a_save += begun > durable
        child = self._child(partial(judge, row.subject, folder, durable, begun))
        try:
            verdict = child.next_report() or {"wrong": "the process that looked at it has crashed"}
        except StuckError as error:
            verdict = {"wrong": f"looking at it does not end: {error}"}
        child.end()
        if "wrong" in verdict:
            row.wrong.append(verdict["wrong"])
        # In the background one is written while the next is announced: either of them is new.
        elif verdict["number"] > durable or durable == begun:
            row.new += 1
        else:
            row.old += 1

    def _time_of_a_save(self, save: Callable[[Path, Report], None]) -> float:
        """Return how many seconds a save takes."""
        with self._folder() as folder:
            child = self._child(partial(save, folder))
            moments = []
            for _ in range(6):
                child.wait_for("durable")
                moments.append(time.monotonic())
            child.end()
        return statistics.median(b - a for a, b in itertools.pairwise(moments))

    def _size_of_a_checkpoint(self, subject: Subject) -> int:
        with self._folder() as folder:
            child = self._child(partial(save_twice, subject, folder, faults.nothing_more))
            while child.next_report() is not None:
                pass
            child.end()
            return sum(file.stat().st_size for file in folder.rglob("*") if not file.is_symlink())

    def _child(self, function: Callable[[Report], None]) -> Child:
        return Child(function, self._log, self._environ)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Make a folder; it goes afterwards, with what is in it."""
        self._folders += 1
        with tempfile.TemporaryDirectory(prefix="durability-", dir=self._directory) as folder:
            # Also readable for users other than root; see `faults.lose_right_to_write`.
            Path(folder).chmod(0o755)
            yield Path(folder)

    def log(self, most: int = 4000) -> str:
        """Return the end of the processes' output."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-most:]


def _save_on_slow_disk(seed: float, subject: Subject, folder: Path, report: Report) -> None:
    faults.slow_disk(random.Random(seed))
    save_for_ever(subject, folder, report)
