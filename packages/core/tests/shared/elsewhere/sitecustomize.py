"""Python without the calls that only Linux or only POSIX has, for each process that imports it.

It is found by PYTHONPATH. What is taken away at the start is looked for later by core, by tests and
by their child processes. Modules of the standard library that need such a call are loaded before.
"""

from __future__ import annotations

import asyncio  # noqa: F401 - it needs fcntl
import builtins
import ctypes
import io
import multiprocessing.popen_spawn_posix  # noqa: F401
import os
import select
import signal
import subprocess  # noqa: F401
import sys
import tempfile
from typing import Any

OF_OS = (
    *("fork", "setsid", "killpg", "geteuid", "mkfifo", "sysconf", "getloadavg"),
    *("sched_getaffinity", "preadv", "memfd_create", "fdatasync", "posix_fallocate"),
    *("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "O_CLOEXEC", "O_TMPFILE", "RWF_NOWAIT"),
)
OF_SIGNAL = ("SIGURG", "SIGHUP", "SIGUSR1", "pthread_kill")
OF_C = ("prctl", "renameat2", "renameatx_np", "sync_file_range")
MODULES = ("fcntl", "resource")
FOLDERS = ("/proc", "/dev/fd", "/sys")


class _Library:
    """The C library without some functions."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in OF_C:
            raise AttributeError(name)
        return getattr(self._library, name)


def _without_folders(function: Any) -> Any:
    def guarded(path: Any = ".", *args: Any, **options: Any) -> Any:
        text = path if isinstance(path, str) else getattr(path, "__fspath__", str)()
        if isinstance(text, str) and (text in FOLDERS or text.startswith(_INSIDE)):
            raise FileNotFoundError(2, "taken away", text)
        return function(path, *args, **options)

    return guarded


_INSIDE = tuple(f"{folder}/" for folder in FOLDERS)
_real_library = ctypes.CDLL


def _library(name: Any = None, *args: Any, **options: Any) -> Any:
    found = _real_library(name, *args, **options)
    return _Library(found) if name is None else found


def take_away() -> None:
    """Remove the calls, modules and folders."""
    places = ((os, OF_OS), (signal, OF_SIGNAL), (select, ("poll",)))
    for place, names in places:
        for name in names:
            if hasattr(place, name):
                delattr(place, name)
    setattr(tempfile, "_O_TMPFILE_WORKS", False)  # noqa: B010 - private: it has looked before
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]
    setattr(ctypes, "CDLL", _library)  # noqa: B010 - it is a class
    for place, name in (
        *((os, name) for name in ("open", "stat", "lstat", "listdir", "scandir")),
        *((builtins, "open"), (io, "open")),
    ):
        setattr(place, name, _without_folders(getattr(place, name)))


take_away()
