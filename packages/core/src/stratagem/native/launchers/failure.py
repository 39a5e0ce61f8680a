"""What a rank does when it, or one that it has started, fails: one error, and no process left."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

from stratagem import supervision
from stratagem.supervision import Failure, Ranks

Result = TypeVar("Result")

_PEER_GRACE = 3.0
"""Seconds that an error of communication waits for the news that a peer has failed."""
_PATIENCE = 10.0
"""Seconds that the first rank, at its end, waits for the others before it says so."""
_REACTION_GRACE = 5.0
"""Seconds that the main thread has to notice that a peer has failed."""


def run_as_rank(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run a function on this rank and return what it returns.

    What it raises is reported to whoever started this rank. Where a peer's failure is the cause of
    an error of communication here, that failure is raised in its place.
    """
    _prepare_this_rank()
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        watch = Watch.current
        if watch is None:
            supervision.record_failure(error)
            raise
        failure = watch.cause_of(error)
        if failure is None:
            # The caller may handle it, on every rank alike; if nobody does, the hook below ends
            # the ranks.
            raise
        raise failure.error(watch.world_size) from None


class Watch:
    """The ranks that this process has started, and how their failure reaches its main thread."""

    current: ClassVar[Watch | None] = None

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        world_size: int,
    ) -> None:
        """Start the ranks and watch them until this process ends."""
        cls.current = cls(command, environments, world_size)

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        world_size: int,
    ) -> None:
        self.world_size = world_size
        self.crashed = False
        self._noticed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            # SIGURG, because it is ignored where nobody handles it, and hardly anybody does.
            signal.signal(signal.SIGURG, self._raise_in_main_thread)
        self.ranks = Ranks(
            command, environments, on_failure=self._interrupt, cwd=supervision.STARTED_IN
        )
        # Last in, first out: what is registered later (leaving the process group) comes before.
        atexit.register(self._finish)

    def cause_of(self, error: BaseException) -> Failure | None:
        """Return the failure of a peer that an error here results from, or None: it is our own."""
        self._noticed.set()
        began = time.time()
        # A lost connection is a RuntimeError, whatever the backend.
        if isinstance(error, RuntimeError) and self.ranks.failure is None:
            self.ranks.wait(_PEER_GRACE)
        failure = self.ranks.failure
        if failure is None or (failure.report and failure.time > began):
            self._noticed.clear()
            return None
        return failure

    def _interrupt(self, failure: Failure) -> None:
        """In the watching thread: bring the main thread out of whatever it waits for."""
        if self._noticed.is_set():
            return
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGURG)
        if not self._noticed.wait(_REACTION_GRACE):
            # Stuck where no signal handler runs: there is no other way out.
            print(f"\n{failure.error(self.world_size)}", file=sys.stderr, flush=True)
            self.ranks.kill()
            self.ranks.forget()
            os._exit(1)

    def _raise_in_main_thread(self, number: int, frame: FrameType | None) -> None:
        failure = self.ranks.failure
        if failure is not None and not self._noticed.is_set():
            self._noticed.set()
            raise failure.error(self.world_size)

    def _finish(self) -> None:
        """At the end of the script: wait for the ranks, which are at its end too."""
        told = self.crashed or self._noticed.is_set()
        # From here on nothing is raised in this thread, where an exception would be ignored.
        self._noticed.set()
        if not self.crashed:
            try:
                if not self.ranks.wait(_PATIENCE):
                    print(
                        "stratagem: this rank is done; it waits for the others, which still run "
                        "or wait in a collective that this rank never joined",
                        file=sys.stderr,
                        flush=True,
                    )
                    self.ranks.wait()
            except KeyboardInterrupt:
                pass
        failure = self.ranks.failure
        self.ranks.end()
        if failure is not None and not told:
            print(f"{failure.error(self.world_size)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


_prepared = False


def _prepare_this_rank() -> None:
    """Once in each rank: end with the parent, and report what nobody catches."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    supervision.die_with_parent()
    # Without it the interpreter takes half a second longer to end once torch is loaded.
    atexit.register(gc.freeze)
    print_exception = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        watch = Watch.current
        if watch is not None:
            failure = watch.cause_of(error)
            if failure is not None:
                print(failure.error(watch.world_size), file=sys.stderr, flush=True)
            else:
                print_exception(kind, error, trace)
            watch.crashed = True
            watch.ranks.end()
        elif not (supervision.record_failure(error) and supervision.has_parent()):
            # A parent of ours shows the recorded traceback; anybody else may not.
            print_exception(kind, error, trace)

    sys.excepthook = report
