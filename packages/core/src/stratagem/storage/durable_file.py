"""DurableFile: a file that appears at its path whole and on the disk, or not at all."""

from __future__ import annotations

import fcntl
import functools
import os
import secrets
import shutil
import time
import zlib
from pathlib import Path
from types import TracebackType

from stratagem.storage.streamed_file import StreamedFile, sync_directory

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
        make_directory(path.parent)
        remove_leftovers(path.parent)
        self._temporary, descriptor = _create_locked(path.parent)
        self._file = StreamedFile(descriptor)

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
        return self._file.write(data)

    def commit(self) -> None:
        """Return once what was written is at the path, and on the disk.

        Raises:
            OSError: it is not; after a failed fsync of the directory `renamed` is True, and the
                file is in its place, but a power cut may take it away again.
        """
        self._file.sync()
        self._temporary.replace(self.path)
        self.renamed = True
        sync_directory(self.path.parent)


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of writers that are dead; those of living ones are left alone."""
    for leftover in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            flags = os.O_RDONLY if leftover.is_dir() else os.O_RDWR
            descriptor = os.open(leftover, flags | os.O_NOFOLLOW)
        except OSError:
            continue  # it has its name by now, or it is somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leftover.name.startswith(_PREFIX + _host()) or (
                time.time() - os.fstat(descriptor).st_mtime > _FOREIGN_AGE
            ):
                remove_path(leftover)
        except OSError:
            pass  # its writer lives, or nobody can tell
        finally:
            os.close(descriptor)


def temporary_path(directory: Path) -> Path:
    """Return a path in `directory` that nobody has, for what is being written."""
    return directory / f"{_PREFIX}{_host()}-{secrets.token_hex(8)}{_SUFFIX}"


def remove_path(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it is there."""
    while path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass  # another process removes it too, as a leftover
    path.unlink(missing_ok=True)


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = temporary_path(directory)
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


def make_directory(directory: Path) -> None:
    """Make a directory and those above it, so that they too are there after a power cut."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
