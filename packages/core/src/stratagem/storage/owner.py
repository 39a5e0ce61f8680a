"""Owner: the process that a temporary file or a claim belongs to, and whether it still runs.

A lock (flock) alone does not say so: some file systems have none, on others one node does not see
another's. So an owner is named: by the boot of its machine, its namespace of process ids (that of a
container), its id there, and the time of its start, since ids are used again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from stratagem import system

_FORM = re.compile(r"([0-9a-f]{16})\.(\d+)\.([1-9]\d*)\.(\d+)")
FORGOTTEN_AFTER = 24 * 3600
"""Seconds without a change after which what an owner elsewhere has left is a leftover."""


@dataclass(frozen=True)
class Owner:
    """A process.

    Attributes:
        boot: the ID of the machine's current boot.
        namespace: the PID namespace of its process id; 0 on systems without namespaces.
        pid: its process id.
        started: the start time, in ticks since the boot; 0 if the system does not report it.

    Example:
        >>> owner = Owner.this()
        >>> Owner.parse(str(owner)) == owner, owner.runs()
        (True, True)
    """

    boot: str
    namespace: int
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}.{self.namespace}.{self.pid}.{self.started}"

    @classmethod
    def this(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(*_here(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner in a text, or None if the text has another form."""
        found = _FORM.fullmatch(text)
        return found and cls(found[1], int(found[2]), int(found[3]), int(found[4]))

    def runs(self) -> bool | None:
        """Return whether the owner's process runs; None if this process cannot see it."""
        if (self.boot, self.namespace) != _here() or sys.platform == "win32":
            return None  # on Windows os.kill(pid, 0) would be Ctrl-C
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # the process belongs to another user
        started = _started(self.pid)
        return started is None or started == self.started


def has_ended(
    owner: Owner | None,
    descriptor: int,
    modified: float,
    *,
    forgotten_after: float = FORGOTTEN_AFTER,
) -> bool:
    """Return whether the owner of a file or directory has ended, which makes it a leftover.

    If this cannot be determined, only old files and directories count as leftovers.

    Args:
        owner: the owner, or None if unknown.
        descriptor: the descriptor of the file or directory, which the owner has locked, if the file
            system supports locks.
        modified: the time of the last change, in seconds since the epoch.
        forgotten_after: the smallest age of a leftover in seconds, if the state of its owner cannot
            be determined.
    """
    runs = None if owner is None else owner.runs()
    if runs is not None:
        return not runs
    try:
        # Shared: two that look do not take one another for the owner.
        system.lock(descriptor, shared=True, wait=False)
        system.unlock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        pass  # this file system has no locks
    else:
        # In another container under this kernel, which would know of its lock. From another machine
        # locks may or may not be seen.
        if owner is not None and owner.boot == _here()[0]:
            return True
    return time.time() - modified > forgotten_after


@functools.cache
def _here() -> tuple[str, int]:
    """Return this process's machine and namespace, which its forks share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link to no path
    except OSError:
        boot, namespace = platform.node(), 0  # of another system than Linux
    return hashlib.sha256(boot.encode()).hexdigest()[:16], namespace


def _started(pid: int) -> int | None:
    """Return when a process was started; -1: it has ended; None: the system does not say."""
    try:
        # PID (NAME) STATE ..., where the name may be anything. See proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
