"""Files on a local file system: durable writes, temporary names, removal."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from stratagem.errors import CheckpointCorruptError
from stratagem.storage.owner import Owner, has_ended
from stratagem.system import BINARY, DIRECTORY, NO_LINK, NO_WAIT, c_library, lock, swap_paths

_PREFIX, _SUFFIX = ".stratagem-", ".saving"
_NOT_OPENED = {errno.ELOOP: "a link", errno.ENXIO: "a socket"}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def sync_directory(directory: os.PathLike[str]) -> None:
    """Return once the names in a directory are on the disk, on systems that can wait for it."""
    if not DIRECTORY:
        return
    descriptor = os.open(directory, os.O_RDONLY | DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a file to read it, unbuffered; do not wait for a process that writes to it.

    Args:
        path: the path of the file.
        follow: whether to open the target of a symbolic link.

    Raises:
        CheckpointCorruptError: the path is not a regular file, but a FIFO, a device or a directory,
            or a link that is not followed.
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem.storage import open_regular
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> _ = path.write_bytes(b"abc")
        >>> with open_regular(path) as file:
        ...     file.read()
        b'abc'
    """
    flags = os.O_RDONLY | BINARY | NO_WAIT | (0 if follow else NO_LINK)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno not in _NOT_OPENED:
            raise
        raise _is_no_file(path, _NOT_OPENED[error.errno]) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))
    os.close(descriptor)
    raise _is_no_file(path, _KINDS.get(stat.S_IFMT(mode), "something else"))


def _is_no_file(path: Path, kind: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{str(path)!r} was refused: it is {kind}, expected a regular file"
    )


def make_directory(directory: Path) -> None:
    """Make a directory and its parents durably, so that a power cut does not remove them."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def temporary_path(directory: Path) -> Path:
    """Return an unused path in `directory` for temporary files and directories."""
    return directory / f"{_PREFIX}{Owner.this()}-{secrets.token_hex(8)}{_SUFFIX}"


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its contents; do nothing if the path is missing.

    All of it or nothing: a directory is renamed first, to a name under which the next save
    removes what a kill leaves of it.
    """
    if path.is_dir() and not path.is_symlink():
        if not (path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)):
            doomed = temporary_path(path.parent)
            path.rename(doomed)
            path = doomed
        while path.is_dir():
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                pass  # another process removes it too, as a leftover
    path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of dead writers, and keep the files of living ones."""
    for leftover in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            flags = os.O_RDONLY if leftover.is_dir() else os.O_RDWR
            descriptor = os.open(leftover, flags | NO_LINK)
        except OSError:
            continue  # it has got its name, or belongs to another process
        try:
            owner = Owner.parse(leftover.name.removeprefix(_PREFIX).partition("-")[0])
            ended = has_ended(owner, descriptor, os.fstat(descriptor).st_mtime)
        finally:
            os.close(descriptor)
        if ended:
            with suppress(OSError):  # somebody else's, perhaps
                remove(leftover)


# Start the disk's writes at intervals of this many bytes, so that fsync waits for little. Of 403
# MB, medians of 12 rounds on a cloud disk: 0.59 of a plain write's time; at every 64 MB 0.70, and
# 0.80 without the alignment.
_WRITEBACK = 16 << 20
_ALIGNMENT = 1 << 20
# Start to write the data of this range; do not wait (sync_file_range(2)).
_SYNC_FILE_RANGE_WRITE = 2


class StreamedFile:
    """Writes a new file from its beginning to its end.

    Args:
        descriptor: of the file, open for writing; this object closes it.
    """

    def __init__(self, descriptor: int) -> None:
        # The buffer collects small pieces; pieces longer than the buffer are written directly.
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 18)
        self.size = 0
        self._handed_over = 0

    def write(self, data: memoryview) -> int:
        """Write all of `data`."""
        self._file.write(data)
        self.size += len(data)
        # Do not touch a part that is being written to the disk: the next write would wait for it.
        end = self.size // _ALIGNMENT * _ALIGNMENT
        if end - self._handed_over >= _WRITEBACK:
            self._file.flush()
            _start_writeback(self._file.fileno(), self._handed_over, end - self._handed_over)
            self._handed_over = end
        return len(data)

    def sync(self) -> None:
        """Flush the file to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; data since the last sync may be lost."""
        self._file.close()


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing a range to the disk; its answer changes nothing."""
    if (function := _sync_file_range()) is not None:
        function(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., Any] | None:
    # Not in `os`. Without it fsync has more to wait for, and that is all.
    function = getattr(c_library(), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


class DurableFile:
    """Writes a temporary file next to a path; `commit` renames it to the path.

    The order makes it safe: write a temporary file in the same directory, fsync the file, rename it
    to the path, fsync the directory. After a kill or a power cut, the path holds either the old
    file or the complete new file.

    The name of the temporary file contains its owner, so that the next writer in the directory
    removes the leftovers of killed processes. A writer in another container cannot see the owner's
    process, but sees its lock (flock), which the kernel releases at the end of the process.

    Leaving the `with` block without `commit` removes the temporary file.

    Args:
        path: the path of the file; a missing directory is created.

    Attributes:
        temporary: the path of the temporary file.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renamed = False
        make_directory(path.parent)
        remove_leftovers(path.parent)
        self.temporary, descriptor = _create_locked(path.parent)
        self._file = StreamedFile(descriptor)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if not self.renamed:
                # Before closing, which lets go of the lock.
                self.temporary.unlink(missing_ok=True)
        finally:
            try:
                self._file.close()
            except OSError:
                # The rest of the buffer met the full disk again: the first error says so already.
                if error is None:
                    raise

    def write(self, data: memoryview) -> int:
        """Write all of `data`."""
        return self._file.write(data)

    def commit(self) -> None:
        """Move the file to its path, durably.

        Raises:
            OSError: the move failed; after a failed fsync of the directory `renamed` is True, and
                the file is at its path, but a power cut may remove it.
        """
        self._file.sync()
        if sys.platform == "win32":  # which renames no open file
            self._file.close()
        self.temporary.replace(self.path)
        self.renamed = True
        sync_directory(self.path.parent)


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = temporary_path(directory)
        # With the permissions of the umask, unlike a temporary file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
        descriptor = os.open(path, flags, 0o666)
        try:
            lock(descriptor)
        except OSError:
            return path, descriptor  # a file system without locks
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        # In the moment between the two, another writer took it for a leftover.
        os.close(descriptor)


class DurableDirectory:
    """A temporary directory beside a path; `commit` moves it to the path.

    Like a `DurableFile`, it records its owner, and the writer holds a lock on it until then, so
    that the next writer removes leftovers of a dead writer.

    Args:
        path: the final path; parent directories are created if necessary.
        may_replace: whether a non-empty directory at `path` may be replaced; None: never.

    Attributes:
        temporary: the directory to write files to.

    Raises:
        OSError: the directory cannot be created, or the path is a directory without a checkpoint.
    """

    def __init__(self, path: Path, *, may_replace: Callable[[Path], bool] | None = None) -> None:
        self.path = path
        holds_files = path.is_dir() and not path.is_symlink() and any(path.iterdir())
        if holds_files and not (may_replace is not None and may_replace(path)):
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
            self._lock = -1
            if not DIRECTORY:
                break
            try:
                self._lock = os.open(self.temporary, os.O_RDONLY | DIRECTORY)
            except FileNotFoundError:
                continue
            try:
                lock(self._lock)
            except OSError:
                break  # a file system without locks
            if self.temporary.exists():
                break
            os.close(self._lock)

    def commit(self) -> None:
        """Move the directory to the path and sync it to disk; its files must be synced before.

        A previous directory at the path is exchanged with it atomically, and then removed.

        Raises:
            OSError: the move failed; the previous directory is still at the path.
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
            # After a power cut either could be left: restore the one that is safe.
            if replaces:
                _exchange(self.temporary, self.path)
            else:
                self.path.rename(self.temporary)
            raise
        self.close()

    def close(self) -> None:
        """Remove the temporary directory, or the replaced directory."""
        remove(self.temporary)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _exchange(first: Path, second: Path) -> None:
    if number := swap_paths(first, second):
        raise OSError(
            number,
            f"{os.strerror(number)}: this file system cannot put a directory in the place of "
            "another in one step; save to a path where there is nothing yet",
        )
