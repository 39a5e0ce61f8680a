"""DurableDirectory: a directory that appears at its path whole and on the disk, or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.storage.local import (
    make_directory,
    remove,
    remove_leftovers,
    sync_directory,
    temporary_path,
)

# From the present working directory; put each at the other's place (renameat2(2)).
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class DurableDirectory:
    """A temporary directory beside a path; `commit` puts it in its place.

    As with a `DurableFile`, it says whose it is, and its writer holds a lock on it until then, so
    that the next writer there removes what a dead one left.

    Args:
        path: where it shall appear; the directory above it is made if there is none.
        may_replace: whether a directory with files in it, at `path`, may be replaced; None: never.

    Attributes:
        temporary: where files are to be written.

    Raises:
        OSError: it cannot be made, or what is at the path is a directory and no checkpoint.
    """

    def __init__(self, path: Path, *, may_replace: Callable[[Path], bool] | None = None) -> None:
        self.path = path
        if _holds_files(path) and not (may_replace is not None and may_replace(path)):
            raise FileExistsError(
                errno.EEXIST,
                "it is a directory with other things in it, which a save would remove: expected a "
                "checkpoint or nothing there, so give another path",
            )
        make_directory(path.parent)
        remove_leftovers(path.parent)
        while True:
            self.temporary = temporary_path(path.parent)
            self.temporary.mkdir()
            # In the moments between, another writer may take it for a leftover and remove it.
            try:
                self._lock = os.open(self.temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError:
                break  # a file system without locks
            if self.temporary.exists():
                break
            os.close(self._lock)

    def commit(self) -> None:
        """Return once the directory is at the path, and on the disk; its files must be already.

        What was at the path before changes places with it, in one step, and is then removed.

        Raises:
            OSError: it is not in its place; what was there before is.
        """
        sync_directory(self.temporary)
        replaces = os.path.lexists(self.path)
        if replaces:
            _exchange(self.temporary, self.path)
        else:
            self.temporary.rename(self.path)
        try:
            sync_directory(self.path.parent)
        except OSError:
            # Nobody knows which of the two a power cut would leave: back to the one that is safe.
            if replaces:
                _exchange(self.temporary, self.path)
            else:
                self.path.rename(self.temporary)
            raise
        self.close()

    def close(self) -> None:
        """Remove the temporary directory, or what it has replaced."""
        remove(self.temporary)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _holds_files(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _exchange(first: Path, second: Path) -> None:
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if renameat2 is not None:
        arguments = os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
        if not renameat2(_AT_FDCWD, arguments[0], arguments[1], arguments[2], arguments[3]):
            return
        number = ctypes.get_errno()
    raise OSError(
        number,
        f"{os.strerror(number)}: this file system cannot put a directory in the place of another "
        "in one step; save to a path where there is nothing yet",
    )
