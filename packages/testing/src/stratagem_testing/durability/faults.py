"""Faults: what makes the disk of this process full, slow, failing or read-only."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SLOW = ("fsync", "fdatasync", "replace", "rename", "link", "symlink", "unlink", "rmdir", "mkdir")
_NOBODY = 65534

Broke = Callable[[], bool]
"""Says afterwards whether a fault has met anything."""
Break = Callable[[], Broke]
"""Breaks the disk of this process."""


def slow_disk(chance: random.Random, most: float = 0.02) -> None:
    """Delay the calls that name a file or make it durable, by up to `most` seconds.

    Half of that before and half after, so that a kill finds the process at either side of it.
    """
    for name in _SLOW:
        setattr(os, name, _delayed(getattr(os, name), chance, most / 2))


def _delayed(function: Callable[..., Any], chance: random.Random, most: float) -> Any:
    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.uniform(0, most))
        result = function(*args, **kwargs)
        time.sleep(chance.uniform(0, most))
        return result

    return delayed


def nothing_more() -> Broke:
    """Leave the disk as broken as before."""
    return lambda: True


def fail_sync(which: int) -> Broke:
    """Let the so-manieth fsync from now on fail with EIO, as a dying disk does."""
    count = 0
    fsync = os.fsync

    def failing(descriptor: Any) -> None:
        nonlocal count
        count += 1
        if count == which:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    setattr(os, "fsync", failing)  # noqa: B010 - a function of other types than its stub has
    return lambda: count >= which


def note_syncs() -> dict[int, int]:
    """Note each file that this process makes durable from now on: its inode, and its size then."""
    noted: dict[int, int] = {}

    def noting(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted_sync(descriptor: Any) -> None:
            sync(descriptor)
            status = os.fstat(descriptor)
            noted[status.st_ino] = status.st_size

        return noted_sync

    for name in ("fsync", "fdatasync"):
        setattr(os, name, noting(getattr(os, name)))
    return noted


def limit_file_size(size: int) -> Broke:
    """Fail every write beyond a size of a file with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return lambda: True


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a file system of a size in bytes at a folder; yield False if this is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def lose_right_to_write(folder: Path) -> Broke:
    """Make a folder read-only, and take root's privilege from this process."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    return lambda: True
