"""Calls that Linux, macOS and Windows do not share, each with a fallback. Standard library only.

A call is looked for by its own name, not by that of the system. Other modules of core use this one
for locks, flags of `os.open`, signals and processes.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = [
    "BINARY",
    "DIRECTORY",
    "ENDING",
    "KILL",
    "NO_LINK",
    "NO_WAIT",
    "PEER_FAILED",
    "PREEMPTION",
    "USER",
    "at_fork",
    "available_cores",
    "c_library",
    "descriptor_path",
    "interrupt_main_thread",
    "lead_session",
    "lock",
    "optional_module",
    "parent_death_signal",
    "send_signal",
    "swap_paths",
    "unlock",
    "user",
]


def optional_module(name: str) -> Any:
    """Return a module of the standard library; None: this system does not have it."""
    try:
        return import_module(name)
    except ImportError:
        return None


# Flags of os.open; 0: the system has no such flag. Without DIRECTORY, no directory can be opened.
BINARY: int = getattr(os, "O_BINARY", 0)
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)


def _signals(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


ENDING = _signals("SIGTERM", "SIGHUP", "SIGINT")
"""Signals that ask a process to end; Ctrl-C is the last one."""
USER = _signals("SIGUSR1", "SIGUSR2")
KILL = _signals("SIGKILL", "SIGTERM")[0]
PREEMPTION = _signals("SIGUSR1", "SIGTERM")[0]
PEER_FAILED = _signals("SIGURG", "SIGBREAK", "SIGUSR2")[0]
"""Interrupts the main thread if a peer has failed. By default, SIGURG is ignored."""

at_fork: Callable[..., Any] = getattr(os, "register_at_fork", dict)
"""`os.register_at_fork`, which has nothing to do on a system that does not fork."""
lead_session: Callable[[], Any] = getattr(os, "setsid", bool)
user: Callable[[], int] = getattr(os, "geteuid", int)
"""The number of the user whose rights this process has; 0 on a system without such numbers."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if affinity is None else len(affinity(0))


def interrupt_main_thread() -> None:
    """Let the main thread call the handler of PEER_FAILED, also out of a call that waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, PEER_FAILED)
    else:
        import_module("_thread").interrupt_main(PEER_FAILED)


def send_signal(pid: int, number: int, *, group: bool) -> None:
    """Send a signal to a process or to the process group that it leads, unless it has ended.

    Windows has no signals between processes: the process is terminated.
    """
    send = getattr(os, "killpg", os.kill) if group else os.kill
    with suppress(ProcessLookupError, PermissionError):  # the latter on Windows
        send(pid, number)


def parent_death_signal() -> Callable[[], None] | None:
    """Return a function that makes the kernel kill the calling process when its parent ends.

    The kernel acts when the parent's thread that started the process ends. None: it cannot.
    """
    prctl = getattr(c_library(), "prctl", None)
    return None if prctl is None else lambda: prctl(1, KILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file, until `unlock` or until all its descriptors are closed.

    Raises:
        BlockingIOError: another process has it, and `wait` is False.
        OSError: the system or the file system has no locks.
    """
    if (fcntl := optional_module("fcntl")) is None:
        raise OSError(errno.ENOLCK, "this system has no flock")
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release the lock of an open file."""
    if (fcntl := optional_module("fcntl")) is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def descriptor_path(descriptor: int) -> str | None:
    """Return a path that leads to an open file, whatever its name is now; None: no such path."""
    folders = ("/proc/self/fd", "/dev/fd")
    return next((f"{one}/{descriptor}" for one in folders if os.path.isdir(one)), None)  # noqa: PTH112


def swap_paths(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> int:
    """Exchange two paths in one step; return the number of the error, or 0."""
    from ctypes import get_errno

    # Both flags are 2. The other number is the present working directory's.
    for name, here in (("renameat2", -100), ("renameatx_np", -2)):
        if (swap := getattr(c_library(), name, None)) is not None:
            failed = swap(here, os.fsencode(first), here, os.fsencode(second), 2)
            return get_errno() if failed else 0
    return errno.ENOSYS


def c_library() -> Any:
    """Return the C library of this process; None on Windows."""
    import ctypes  # here, since most commands do not need it

    with suppress(TypeError):
        return ctypes.CDLL(None, use_errno=True)
