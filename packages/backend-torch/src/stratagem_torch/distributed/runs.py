"""GroupRuns: the ranks meet before each run, and join a new process group after a failed one.

A script may catch the error of one rank's run, and start the next run. The other ranks then wait in
a collective of the failed run, and the group's connections may hold half of a message.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.errors import CommunicationError
from stratagem.launch import line_in_traceback
from stratagem_torch.distributed.diagnosis.rank_status import COLLECTIVES, RankStatuses
from stratagem_torch.distributed.diagnosis.status_exchange import RankStatus, Survey, ranges
from stratagem_torch.distributed.socket_store import prefixed

_LOOK = 0.5
"""Seconds after which a rank looks whether others have ended, or wait in a collective."""
_GRACE = 5.0
"""Seconds that a rank waits for others that are in no collective: they may fail where it did."""
_PATIENCE = 5.0
"""Seconds between two looks for ranks that still wait in a collective of a failed run."""
FAILED = "failed"
"""Where ranks report that a run has failed, followed by the run's number."""
_GO = "go"
_KEPT, _CLOSED = "kept", "closed"
_EPOLL = "anon_inode:[eventpoll]"


class GroupRuns:
    """The runs of one process; each run needs all ranks of its process group.

    1. Each rank calls `begin` before each run. The call waits until all ranks have arrived.
    2. A rank with a failed run calls `fail`. If other ranks then wait for it in a collective, or
       call
       `begin` much later, it closes its connections, so that their collectives fail.
    3. If a run has failed, all ranks join a new group in `begin`. Exception: the run has failed on
       all ranks in the same place before any rank closed its connections. Then no rank waits.

    Args:
        store: the store of the process group; this object opens another connection.
        rank, world_size: this rank, and the number of ranks.
        timeout: seconds that a rank waits for the others.
        join_again: joins a new group, given its number; returns the statuses of its ranks.
        loops_before: the return value of `event_loops` from before the group was joined.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        join_again: Callable[[int], RankStatuses],
        statuses: RankStatuses,
        loops_before: set[int],
    ) -> None:
        self._store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._join_again = join_again
        self._statuses = statuses
        self._loops_before = loops_before
        self._runs = self._groups = 0
        self._failed_at = 0
        """The place where this rank's last run failed, as a number; 0: it has not failed."""
        self._is_closed = False
        """Whether a rank has closed its connections of the group."""

    @property
    def number(self) -> int:
        """The number of the run that was begun last, which all ranks have alike."""
        return self._runs

    def fail(self, error: BaseException) -> None:
        """Note that this rank's run has failed, and tell the ranks that wait for it."""
        place = f"{type(error).__name__} {line_in_traceback(error)} {self._statuses.doing()}"
        # So short that the sum of squares of all ranks is a 64-bit integer.
        self._failed_at = 1 + zlib.crc32(place.encode(errors="replace")) % (1 << 24)
        with self._statuses.failing(error):
            self._statuses.mark("failed", f"{FAILED}/{self._runs}")

    def begin(self, trainer: int) -> int:
        """Wait for all ranks before a run; return the number of their current group.

        Args:
            trainer: the number of the Trainer or Lite in this process, the same on all ranks.

        Raises:
            CommunicationError: another rank has skipped this run, or does not arrive.
        """
        while self._has_skipped(trainer):
            pass  # the others raise, and come to this run next
        return self._groups

    def _has_skipped(self, trainer: int) -> bool:
        """Meet the other ranks; return whether they begin runs that this rank has skipped."""
        prefix, self._runs = f"stratagem_run/{self._runs}", self._runs + 1
        store = prefixed(self._store, prefix)
        numbers = (trainer, self._failed_at)
        for name, number in enumerate(numbers):
            store.add(f"sum/{name}", number)
            store.add(f"squares/{name}", number * number)
        store.append("who", f"{self._rank}:{trainer},")
        if store.add("arrived", 1) == self._world_size:
            _decide(store, "connections", _KEPT)
            _decide(store, "all", _GO)
        self._wait(store)
        # Also if the ranks do not go on now: the next meeting then joins a new group.
        self._is_closed |= _decide(store, "connections", _KEPT) == _CLOSED
        same_run, same_end = (self._is_same(store, name) for name in range(len(numbers)))
        if not same_run:
            pairs = (one.split(":") for one in store.get("who").decode().split(",") if one)
            ahead = [int(rank) for rank, number in pairs if int(number) > trainer]
            if ahead:
                raise CommunicationError(
                    f"rank(s) {ranges(ahead)} skipped this run, and rank {self._rank} begins it: "
                    "every rank must start the same runs. The script may have caught an error of "
                    "those ranks between making a Trainer and its run: let all ranks go on alike"
                )
            return True
        if self._is_closed or not same_end:
            close_connections(self._loops_before)
            self._groups += 1
            self._statuses = self._join_again(self._groups)
        self._failed_at, self._is_closed = 0, False
        return False

    def _is_same(self, store: Any, name: int) -> bool:
        """Return whether a number is the same on all ranks, without reading that of each."""
        total, squares = store.add(f"sum/{name}", 0), store.add(f"squares/{name}", 0)
        return bool(squares * self._world_size == total * total)

    def _wait(self, store: Any) -> None:
        begun = looked_at = time.monotonic()
        is_closed = not self._failed_at
        before: dict[int, RankStatus] = {}
        while not store.check(["all"]):
            now = time.monotonic()
            time.sleep(0.002 if now < begun + 1 else 0.1)
            if now < begun + _LOOK:
                continue
            if not is_closed and (now > begun + _GRACE or self._waiting()):
                is_closed = True
                if _decide(store, "connections", _CLOSED) == _CLOSED:
                    close_connections(self._loops_before)
            gone = {r for r, how in self._statuses.exchange.ended().items() if how == "done"}
            problem = ""
            if gone or now > begun + self._timeout:
                who = f"rank(s) {ranges(gone)} ended the script" if gone else "others did not come"
                problem = (
                    f"rank {self._rank} begins a run, and {who}: every rank must start the same "
                    f"runs (timeout={self._timeout:g} s of the strategy)"
                )
            elif self._failed_at and now > looked_at + _PATIENCE:
                before, problem = self._look(before)
                looked_at = now
            if problem and _decide(store, "all", f"rank {self._rank}") != _GO:
                raise CommunicationError(problem, tuple(sorted(gone)))
        if (decided := store.get("all").decode()) != _GO:
            raise CommunicationError(
                f"{decided} waited for rank {self._rank} to begin this run, and has given up: the "
                "script may have caught an error there; look at the output of that rank"
            )

    def _waiting(self) -> dict[int, RankStatus]:
        """Return where the other ranks are that are in a collective."""
        answers = self._statuses.ask().answers
        return {
            rank: status
            for rank, status in answers.items()
            if rank != self._rank and status.operation in COLLECTIVES
        }

    def _look(self, before: dict[int, RankStatus]) -> tuple[dict[int, RankStatus], str]:
        """Return where the other ranks are, and an error if one still waits in a collective."""
        now = self._waiting()
        stuck = {rank: status for rank, status in now.items() if status == before.get(rank)}
        if not stuck:
            return now, ""
        lines = "\n".join(f"  {line}" for line in self._statuses.described(Survey(stuck), []))
        return now, (
            f"rank {self._rank} failed in its last run and begins the next one, but others "
            f"wait in a collective of the last one, which cannot be ended here:\n{lines}\n"
            "Start each run in processes of its own, or let the error end the script"
        )


def _decide(store: Any, question: str, answer: str) -> str:
    """Answer a question for all ranks; return the answer of the rank that was first."""
    return str(store.compare_set(question, "", answer).decode())


def event_loops() -> set[int]:
    """Return the descriptors of this process's epoll instances; none if not on Linux."""
    return {int(entry.name) for entry in _descriptors() if _target(entry) == _EPOLL}


def close_connections(loops_before: set[int]) -> None:
    """Shut down the connections of event loops that also listen, such as the loops of gloo.

    torch has no call for it: a destroyed group lives on in the models that use it, and the other
    ranks wait for it. Event loops of Python, for example of asyncio servers, are left open.

    Args:
        loops_before: the return value of `event_loops` from before the group was joined.
    """
    for loop in event_loops() - loops_before - _loops_of_python():
        try:
            lines = Path(f"/proc/self/fdinfo/{loop}").read_text().splitlines()
        except OSError:
            continue  # closed since the listing
        watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
        sockets = [one for one in map(_socket, watched) if one is not None]
        try:
            if any(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in sockets):
                for one in sockets:
                    _shut_down(one)
        finally:
            for one in sockets:
                one.close()


def _loops_of_python() -> set[int]:
    if sys.platform != "linux":
        return set()
    found = [one for one in gc.get_objects() if issubclass(type(one), selectors.EpollSelector)]
    return {one.fileno() for one in found if one.get_map() is not None}  # None: closed


def _descriptors() -> list[Path]:
    folder = Path("/proc/self/fd")
    return list(folder.iterdir()) if folder.is_dir() else []


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""  # closed since the listing


def _socket(descriptor: int) -> socket.socket | None:
    """Return a second handle of a socket; None: it is another kind of file."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it listens, or the other side has closed it
