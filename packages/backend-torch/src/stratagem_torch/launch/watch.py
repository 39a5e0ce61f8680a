"""Watch: watches the ranks that this process has started.

A failure of one rank becomes one error, and no process is left.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

from stratagem import system
from stratagem.errors import CommunicationError, RankFailedError
from stratagem.launch import explained, this_rank
from stratagem_torch.launch.supervisor import Failure, Output, RankProcesses, StartRank

_PEER_GRACE = 3.0
"""Seconds to wait for a peer's failure after a communication error."""
_KNOWN_GRACE = 0.5
"""The same, if the ranks have already been queried."""
_REACTION_GRACE = 5.0
"""Seconds within which the main thread must notice a peer's failure."""
_ASK_AGAIN = 0.1
"""Seconds after which the main thread is signalled again, if it could not be interrupted."""


class Watch:
    """Watches the ranks that this process started, and raises their failure in its main thread.

    Example:
        >>> from stratagem.launch import this_rank
        >>> from stratagem_torch.launch import Watch
        >>> isinstance(this_rank.watch, Watch)  # this process has started no ranks
        False
    """

    @classmethod
    def start(
        cls, start: StartRank, environments: Mapping[int, Mapping[str, str]], world_size: int
    ) -> None:
        """Start the ranks and watch them until this process ends."""
        this_rank.watch = cls(start, environments, world_size)

    def __init__(
        self, start: StartRank, environments: Mapping[int, Mapping[str, str]], world_size: int
    ) -> None:
        self.world_size = world_size
        self.crashed = False
        self._noticed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(system.PEER_FAILED, self._raise_in_main_thread)
            for number in system.ENDING[:-1]:
                # A handler of the user, or an ignored signal, stays.
                if signal.getsignal(number) == signal.SIG_DFL:
                    this_rank.handlers.add(self._end_by_signal)
                    signal.signal(number, self._end_by_signal)
        self.ranks = RankProcesses(
            start, environments, on_failure=self._interrupt, output=Output.of(os.environ)
        )
        this_rank.peers_are_gone = lambda: self.ranks.wait(0)
        # Last in, first out: functions registered later (leaving the process group) run before.
        atexit.register(self._finish)

    def resolve_cause(self, error: BaseException) -> BaseException:
        """Return the failure of the peer that caused an error here, or the explained error."""
        if isinstance(error, RankFailedError):
            return error  # resolved before
        self._noticed.set()
        began = time.time()
        resolved = explained(error, lambda: self.ranks.failure is not None)
        lost = isinstance(resolved, CommunicationError)
        # A lost connection is a RuntimeError, whatever the backend.
        if isinstance(error, RuntimeError) and self.ranks.failure is None:
            self.ranks.wait(_KNOWN_GRACE if lost else _PEER_GRACE)
        failure = self.ranks.failure
        if failure is None:
            its_own = True
        elif isinstance(error, SystemExit):
            # All ranks end in order, and that peer has ended first.
            its_own = not failure.report
        elif lost:
            # A peer that lost its connections too is not the cause.
            its_own = CommunicationError.__name__ in failure.report
        else:
            its_own = bool(failure.report) and failure.time > began
        if failure is None or its_own:
            self._noticed.clear()
            return resolved
        where = f"{resolved.where}\n" if isinstance(resolved, CommunicationError) else ""
        return self._error(failure, where)

    def end_after_error(self) -> None:
        """End the ranks, since an error ends this process."""
        self.crashed = True
        self.ranks.end()

    def _interrupt(self, failure: Failure) -> None:
        """In the watching thread, interrupt the main thread."""
        this_rank.lost_peer = True
        if self._noticed.is_set() or this_rank.ending or this_rank.interrupted:
            return
        deadline = time.monotonic() + _REACTION_GRACE
        while time.monotonic() < deadline:
            system.interrupt_main_thread()
            if self._noticed.wait(_ASK_AGAIN) or this_rank.ending or this_rank.interrupted:
                return
        # The main thread is stuck in code where no signal handler runs: end the process.
        print(f"\n{self._error(failure, '')}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        self.ranks.kill()
        self.ranks.forget()
        os._exit(1)

    def _raise_in_main_thread(self, number: int, frame: FrameType | None) -> None:
        failure = self.ranks.failure
        # A finalizer's exception would be printed and ignored; the next signal comes after it.
        if failure is not None and not self._noticed.is_set() and not _in_finalizer(frame):
            self._noticed.set()
            raise self._error(failure, this_rank.where(frame))

    def _error(self, failure: Failure, where: str) -> RankFailedError:
        """Return the error for a failure; a rank that was killed has not told its place."""
        place = failure.place or this_rank.place_of(failure.rank)
        return replace(failure, place=place).error(self.world_size, where)

    def _end_by_signal(self, number: int, frame: FrameType | None) -> None:
        """End the ranks and this process in an orderly way, so that no temporary file stays."""
        self._noticed.set()
        self.crashed = True
        self.ranks.forward_signal(signal.Signals(number))
        raise SystemExit(128 + number)

    def _finish(self) -> None:
        """At the end of the script, wait for the ranks, which end their scripts too."""
        was_said = self.crashed or self._noticed.is_set() or this_rank.interrupted
        # From now on nothing is raised in this thread, in which an exception would be ignored.
        self._noticed.set()
        if not self.crashed:
            try:
                self.ranks.wait()
            except KeyboardInterrupt:
                pass
        failure = self.ranks.failure
        self.ranks.end()
        if failure is not None and not was_said:
            print(f"{failure.error(self.world_size)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether a `__del__` is running here, such as a DataLoader's, which waits for its workers."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
