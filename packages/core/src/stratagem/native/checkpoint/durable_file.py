"""DurableFile: a file that appears at its path whole and on the disk, or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import secrets
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

# The disk is given its work every so many bytes, so that little is left for fsync to wait for. Of
# 403 MB, medians of 12 rounds on a cloud disk: 0.59 of a plain write's time; at every 64 MB 0.70,
# and 0.80 without the alignment.
_WRITEBACK = 16 << 20
_ALIGNMENT = 1 << 20
# Start to write what is in this range; do not wait (sync_file_range(2)).
_SYNC_FILE_RANGE_WRITE = 2

_PREFIX, _SUFFIX = ".stratagem-", ".saving"
# Whether locks of another host are seen depends on the network file system. What came from another
# host is therefore a leftover only if it has not changed for so long, in seconds.
_FOREIGN_AGE = 24 * 3600


class DurableFile:
    """Writes beside a path; `commit` puts what was written in its place.

    The order that makes it safe: a temporary file in the same directory, fsync of the file, rename
    over the path, fsync of the directory. A kill or a power cut at any moment leaves at the path
    what was there before, or all of what was written.

    A writer holds a lock (flock) on its temporary file until that has its name. The kernel lets go
    of it when the process dies, however it dies; so a temporary file that is not locked has no
    writer, and the next one to write in the directory removes it.

    Leaving the `with` block without `commit` removes the temporary file.

    Args:
        path: where the file shall appear; its directory is made if there is none.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renamed = False
        _make_directory(path.parent)
        remove_leftovers(path.parent)
        self._temporary, descriptor = _create_locked(path.parent)
        # Small pieces are collected; those that are longer than the buffer are written from where
        # they are.
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 18)
        self._written = self._handed_over = 0

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self.renamed:
                # Before closing, which lets go of the lock.
                self._temporary.unlink(missing_ok=True)
        finally:
            try:
                self._file.close()
            except OSError:
                # A full disk again, at what was still in the buffer: the first error says it.
                if error is None:
                    raise

    def write(self, data: memoryview) -> int:
        """Write all of `data`."""
        self._file.write(data)
        self._written += len(data)
        # What is being written to the disk is not touched again: the next write would wait for it.
        end = self._written // _ALIGNMENT * _ALIGNMENT
        if end - self._handed_over >= _WRITEBACK:
            self._file.flush()
            _start_writeback(self._file.fileno(), self._handed_over, end - self._handed_over)
            self._handed_over = end
        return len(data)

    def commit(self) -> None:
        """Return once what was written is at the path, and on the disk.

        Raises:
            OSError: it is not; after a failed fsync of the directory `renamed` is True, and the
                file is in its place, but a power cut may take it away again.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)
        self.renamed = True
        _fsync_directory(self.path.parent)


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of writers that are dead; those of living ones are left alone."""
    for leftover in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # it has its name by now, or it is somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leftover.name.startswith(_PREFIX + _host()) or (
                time.time() - os.fstat(descriptor).st_mtime > _FOREIGN_AGE
            ):
                leftover.unlink(missing_ok=True)
        except OSError:
            pass  # its writer lives, or nobody can tell
        finally:
            os.close(descriptor)


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{_PREFIX}{_host()}-{secrets.token_hex(8)}{_SUFFIX}"
        # With the rights that the umask leaves, not those of a temporary file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks. Nobody else can lock it either, so nobody removes it.
            return path, descriptor
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        # In the moment between the two, another writer took it for a leftover.
        os.close(descriptor)


@functools.cache
def _host() -> str:
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, so that they too are there after a power cut."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _fsync_directory(directory.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing a range to the disk; its answer changes nothing."""
    if (function := _sync_file_range()) is not None:
        function(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., Any] | None:
    # Not in `os`. Without it fsync has more to wait for, and that is all.
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
