"""DurableFile: a file that appears at its path whole and on the disk, or not at all."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from stratagem.storage.local import (
    make_directory,
    remove_leftovers,
    sync_directory,
    temporary_path,
)
from stratagem.storage.streamed_file import StreamedFile


class DurableFile:
    """Writes beside a path; `commit` puts what was written in its place.

    The order that makes it safe: a temporary file in the same directory, fsync of the file, rename
    over the path, fsync of the directory. A kill or a power cut at any moment leaves at the path
    what was there before, or all of what was written.

    The temporary file's name says whose it is, so that the next one to write in the directory
    removes what a process that was killed has left. Where that cannot see the writer (in another
    container), it sees that the writer holds a lock (flock), which the kernel drops with a process.

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


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = temporary_path(directory)
        # With the rights that the umask leaves, not those of a temporary file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return path, descriptor  # a file system without locks
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        # In the moment between the two, another writer took it for a leftover.
        os.close(descriptor)
