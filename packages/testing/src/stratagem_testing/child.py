"""Child: a forked process that reports what it does, line by line, until it is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Any

Report = Callable[..., None]

PATIENCE = 120.0
"""Seconds without a word after which a child counts as stuck."""


class StuckError(Exception):
    """A child has neither ended nor reported anything for too long."""


class Child:
    """A process that runs a function; forked, since importing torch takes longer than a save.

    A report is in the pipe before the function continues, so that reports outlive a kill.

    Args:
        function: called with `report`, which takes keyword arguments of weights-only-safe data.
        log: receives the output of the process and its children.
        environ: additional environment variables.
    """

    def __init__(
        self, function: Callable[[Report], None], log: IO[bytes], environ: dict[str, str]
    ) -> None:
        self._told = b""
        self._all: list[dict[str, Any]] = []
        self._pipe, writing = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._pipe)
                os.setsid()  # its children are killed with it
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os.environ.update(environ)
                function(partial(_tell, writing))
                code = 0
            # The end of the process: nothing of the parent's may run here.
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writing)

    def next_report(self, patience: float = PATIENCE) -> dict[str, Any] | None:
        """Return the next report of the process.

        None: the process has ended.

        Raises:
            StuckError: no report arrived in time.
        """
        until = time.monotonic() + patience
        while b"\n" not in self._told:
            if not select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise StuckError(f"no word in {patience:.0f} s")
            more = os.read(self._pipe, 1 << 16)
            if not more:
                return None
            self._told += more
        line, _, self._told = self._told.partition(b"\n")
        reported: dict[str, Any] = json.loads(line)
        self._all.append(reported)
        return reported

    def wait_for(self, name: str, patience: float = PATIENCE) -> Any:
        """Return the value of the first report with a name.

        Raises:
            StuckError: it did not, also because it has ended.
        """
        while (reported := self.next_report(patience)) is not None:
            if name in reported:
                return reported[name]
        raise StuckError(f"it ended without having reported {name!r}")

    def end(self) -> list[dict[str, Any]]:
        """Kill it and its children, if they live; return everything that it has reported."""
        self.kill()
        os.waitpid(self.pid, 0)
        # All reports are in the pipe, but a process that outlives this one may hold its end open.
        with suppress(StuckError):
            while self.next_report(0.0) is not None:
                pass
        os.close(self._pipe)
        return self._all

    def kill(self) -> None:
        """Send SIGKILL to it and to its children."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has ended, or is so young that it has no group of its own yet.
            os.kill(self.pid, signal.SIGKILL)


def _tell(pipe: int, **what: Any) -> None:
    os.write(pipe, json.dumps(what).encode() + b"\n")
