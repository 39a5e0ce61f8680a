"""Steps on a local file system that several writers take: temporary names, removal, fsync."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, cast

from stratagem.errors import CheckpointCorruptError
from stratagem.storage.owner import Owner, has_ended

_PREFIX, _SUFFIX = ".stratagem-", ".saving"
_NOT_OPENED = {errno.ELOOP: "a link", errno.ENXIO: "a socket"}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def sync_directory(directory: os.PathLike[str]) -> None:
    """Return once the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a file to read it, unbuffered; never wait for whoever may write to it.

    Args:
        path: where.
        follow: what a symbolic link leads to may be opened.

    Raises:
        CheckpointCorruptError: it is no regular file, but a FIFO, a device or a directory, or a
            link that is not followed.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
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
    """Make a directory and those above it, so that they too are there after a power cut."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def temporary_path(directory: Path) -> Path:
    """Return a path in `directory` that nobody has, for what is being written or removed."""
    return directory / f"{_PREFIX}{Owner.this()}-{secrets.token_hex(8)}{_SUFFIX}"


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with what is in it, if there is one.

    All of it or nothing: a directory is renamed first, to a name under which the next save
    removes what a kill leaves of it.
    """
    if path.is_dir() and not path.is_symlink():
        if not _is_temporary(path):
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
    """Remove the temporary files of writers that are dead; those of living ones are left alone."""
    for leftover in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            flags = os.O_RDONLY if leftover.is_dir() else os.O_RDWR
            descriptor = os.open(leftover, flags | os.O_NOFOLLOW)
        except OSError:
            continue  # it has its name by now, or it is somebody else's
        try:
            owner = Owner.parse(leftover.name.removeprefix(_PREFIX).partition("-")[0])
            if has_ended(owner, descriptor, os.fstat(descriptor).st_mtime):
                remove(leftover)
        except OSError:
            pass  # somebody else's, perhaps
        finally:
            os.close(descriptor)


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)
