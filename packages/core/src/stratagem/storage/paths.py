"""Where files lie: a local path, or a URL that fsspec knows ("s3://bucket/run/last.ckpt").

The only place that asks which of the two a path is. Local paths are `Path`s and URLs are `str`s,
since `pathlib` makes "s3:/bucket" of "s3://bucket"; `to_location` converts what a user gives.
fsspec is imported when the first URL comes up; `remote` is what needs it.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, TypeGuard, cast

from stratagem.errors import CheckpointSaveError, ConfigurationError
from stratagem.storage import local
from stratagem.storage.local import DurableFile
from stratagem.storage.remote import RemoteFile, fetch, file_system, is_object_store, protocols

Location = Path | str
"""A local path, or a URL."""

# Bytes of a name that Linux's file systems take.
_LONGEST_NAME = 255
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
# Errors of file systems without symbolic links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL.

    Example:
        >>> from stratagem.storage.paths import is_url
        >>> is_url("s3://bucket/run"), is_url("/data/run")
        (True, False)
    """
    return "://" in os.fspath(path)


def to_location(path: str | os.PathLike[str]) -> Location:
    """Return a `Path` for a local path, or a `str` for a URL.

    Raises:
        ConfigurationError: the path is a URL that has gone through `pathlib`.
    """
    text = os.fspath(path)
    if text.startswith(("file://", "local://")):
        return Path(text.partition("://")[2])
    if is_url(text):
        return text.rstrip("/")
    if isinstance(path, Path) and _COLLAPSED.match(text):
        raise ConfigurationError(
            f"received {path!r}, a URL of which pathlib has taken a slash: pass it as a str"
        )
    return Path(path)


def parse_user_path(path: str | os.PathLike[str]) -> Location:
    """Return the location of a user's path, with "~" expanded to a home folder.

    Use it only for paths that users write: other file names may begin with "~" too.

    Raises:
        ConfigurationError: if the path is a URL that went through `pathlib`, or if the user of the
            home folder does not exist.
    """
    location = to_location(path)
    # pathlib leaves the "./" of "./~" out, and would expand it.
    if not isinstance(location, Path) or not os.fspath(path).startswith("~"):
        return location
    try:
        return location.expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{os.fspath(path)!r}: {error}; write the folder out, or './~...' for one of that name"
        ) from error


# -- names


def join(folder: str | os.PathLike[str], name: str) -> Location:
    """Return the path of `name` in a folder."""
    folder = to_location(folder)
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def parent(path: str | os.PathLike[str]) -> Location:
    """Return the folder that something lies in."""
    path = to_location(path)
    return path.parent if isinstance(path, Path) else path.rpartition("/")[0]


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path."""
    return os.fspath(path).rstrip("/").rpartition("/")[2]


def absolute(path: str | os.PathLike[str]) -> Location:
    """Return a path that does not depend on the working directory.

    Example:
        >>> from stratagem.storage import absolute
        >>> str(absolute("s3://bucket/a.ckpt"))
        's3://bucket/a.ckpt'
    """
    path = to_location(path)
    return path.absolute() if isinstance(path, Path) else path


def relative(path: str | os.PathLike[str], folder: str | os.PathLike[str] = ".") -> str:
    """Return `path` relative to `folder`, or its absolute form if it lies outside of `folder`.

    Messages show paths relative to the working folder, which is the default.
    """
    whole, beginning = str(absolute(path)), f"{absolute(folder)}/"
    return whole[len(beginning) :] if whole.startswith(beginning) else whole


def is_name(text: object) -> TypeGuard[str]:
    r"""Return whether a text names something in a folder, and can lead nowhere else.

    The rule for every name that was read from a checkpoint: one part of a path that can be
    printed, no "." or "..", no separator of any system, and not the "::" by which fsspec chains
    file systems.

    Example:
        >>> from stratagem.storage.paths import is_name
        >>> [is_name(text) for text in ("a.ckpt", "../a", "/a", "b\\a", "s3://b/a", "", None)]
        [True, False, False, False, False, False, False]
    """
    return (
        isinstance(text, str)
        and text not in ("", ".", "..")
        and text.isprintable()
        and len(text.encode()) <= _LONGEST_NAME
        and not any(part in text for part in ("/", "\\", "::"))
    )


# -- looking


@dataclass(frozen=True)
class Entry:
    """A file or directory in a folder.

    Attributes:
        path: the path; for a symbolic link, the path of its target.
        modified: the time of modification, in seconds since 1970; 0 if unknown.
        is_directory: whether the entry is a directory.
    """

    path: Location
    modified: float
    is_directory: bool


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path exists; False for a broken link."""
    path = to_location(path)
    if isinstance(path, Path):
        return path.exists()
    with file_system(path) as (files, there):
        return bool(files.exists(there))


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is there; on an object store, objects under that name."""
    path = to_location(path)
    if isinstance(path, Path):
        return path.is_dir()
    with file_system(path) as (files, there):
        return bool(files.isdir(there))


def target_of(path: str | os.PathLike[str]) -> Location:
    """Return the target of a symbolic link; other paths are returned unchanged."""
    path = to_location(path)
    if isinstance(path, Path) and path.is_symlink():
        return path.parent / path.readlink()
    return path


def names(folder: str | os.PathLike[str]) -> set[str]:
    """Return the names of all that is in a folder, also hidden ones and links that lead nowhere."""
    folder = to_location(folder)
    if isinstance(folder, Path):
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    with file_system(folder) as (files, there):
        try:
            return {name_of(path) for path in files.ls(there, detail=False)}
        except FileNotFoundError:
            return set()


def entries(folder: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries of a folder without hidden names; an empty list for a missing folder."""
    folder = to_location(folder)
    if not isinstance(folder, Path):
        return _remote_entries(folder)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        target = Path(target_of(path))
        try:
            found.append(Entry(target, target.stat().st_mtime, target.is_dir()))
        except OSError as error:
            # Report a broken link; a missing file was removed just now.
            if not path.is_symlink() and not isinstance(error, FileNotFoundError):
                raise
            if path.is_symlink():
                found.append(Entry(target, path.lstat().st_mtime, False))
    return found


def _remote_entries(folder: str) -> list[Entry]:
    with file_system(folder) as (files, there):
        try:
            listed = files.ls(there, detail=True)
        except FileNotFoundError:
            return []
        found = []
        for info in listed:
            name = name_of(info["name"])
            if name.startswith(".") or info["name"].strip("/") == there.strip("/"):
                continue
            try:
                modified = files.modified(f"{there}/{name}").timestamp()
            except (NotImplementedError, FileNotFoundError, IsADirectoryError):
                modified = 0.0
            found.append(Entry(f"{folder}/{name}", modified, info["type"] == "directory"))
        return found


# -- reading


@contextmanager
def open_local(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that can be mapped into memory; a URL is downloaded first.

    The downloaded copy has no name, so that the system deletes it when the last process closes it.
    Processes of a machine that open a URL at the same time share a copy.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read, or the directory for temporary files (TMPDIR) has no room
            for the copy.
    """
    path = to_location(path)
    # Unbuffered: checkpoints are read in large pieces.
    if isinstance(path, Path):
        with local.open_regular(path) as file:
            yield file
    else:
        with os.fdopen(fetch(path), "rb", buffering=0) as file:
            yield cast("BinaryIO", file)


@contextmanager
def open_in_place(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file to read a small part of the contents, without downloading the rest."""
    path = to_location(path)
    if isinstance(path, Path):
        with local.open_regular(path) as file:
            yield file
        return
    with file_system(path) as (files, there):
        opened = files.open(there, "rb", block_size=1 << 17)
    with opened as file:
        yield file


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a small file."""
    path = to_location(path)
    if isinstance(path, Path):
        return path.read_bytes()
    with file_system(path) as (files, there):
        return bytes(files.cat_file(there))


# -- writing


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a small file in its place in one step: whole and on the disk, or the old one is there."""
    path = to_location(path)
    with DurableFile(path) if isinstance(path, Path) else RemoteFile(path) as file:
        file.write(memoryview(data))
        file.commit()


@contextmanager
def durable_file(path: str | os.PathLike[str]) -> Iterator[DurableFile | RemoteFile]:
    """Open a new file, which replaces the file at `path` at the end of the block.

    Raises:
        CheckpointSaveError: the file system rejected the file; the message describes the file that
            is at the path now.
    """
    path = to_location(path)
    if isinstance(path, Path) and path.is_dir():
        raise CheckpointSaveError(f"cannot save {str(path)!r}: it is a directory, give a file")
    file = None
    try:
        with DurableFile(path) if isinstance(path, Path) else RemoteFile(path) as file:
            yield file
            file.commit()
    except OSError as error:
        if file is not None and file.renamed:
            state = "it is in its place, but may be lost in a power cut"
        elif _may_exist(path):
            state = "what was there before is unchanged"
        else:
            state = "nothing is there"
        raise CheckpointSaveError(
            f"cannot save {str(path)!r}: {type(error).__name__}: {error}; {state}",
            errno=error.errno,
        ) from error


def _may_exist(path: Location) -> bool:
    try:
        return exists(path)
    except OSError:
        return True  # of a file system that cannot be reached: it has changed nothing


@contextmanager
def durable_replace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new, empty file, which takes the place of `path` at the end of the block.

    For files that another library writes: a database, HDF5, safetensors. The new file is synced,
    For files that another library writes: a database, HDF5, safetensors. The new file is synced,
    renamed over `path`, and the directory is synced. A kill or a power cut at any moment leaves the
    complete old or new file. If the block raises, the old file stays and the new file is removed;
    the next save in the directory removes leftovers of a killed process.

    Args:
        path: a local path. The library must write to the yielded path in place and close the file.

    Raises:
        CheckpointSaveError: the file system rejected the file, or `path` is a URL.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem.storage import durable_replace
        >>> target = Path(tempfile.mkdtemp(), "notes.txt")
        >>> with durable_replace(target) as new:
        ...     new.write_text("whole or not at all")
        19
        >>> target.read_text()
        'whole or not at all'
    """
    if is_url(path) and not isinstance(to_location(path), Path):
        raise CheckpointSaveError(
            f"cannot save {str(path)!r}: this format writes local files; give a local path"
        )
    with durable_file(path) as file:
        assert isinstance(file, DurableFile)
        yield file.temporary


def try_folder(folder: str | os.PathLike[str]) -> None:
    """Create a local folder if necessary, and check that files can be written there.

    Raises:
        OSError: the folder cannot be created, or files cannot be written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"tried")


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, a link, or a directory with its contents; do nothing if the path is missing.

    A local directory is removed completely or not at all, even if the process is killed.
    """
    path = to_location(path)
    if not isinstance(path, Path):
        with file_system(path) as (files, there):
            if files.exists(there):
                files.rm(there, recursive=bool(files.isdir(there)))
    else:
        local.remove(path)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    """Make `path` a second name of `target`, atomically; a link at `path` is replaced.

    A local path becomes a symbolic link, which is relative, so that it can move with its folder. An
    object store makes a copy on the server.

    Returns:
        False if the file system supports neither, or if `path` is a directory.
    """
    target, path = to_location(target), to_location(path)
    if isinstance(path, Path):
        return _link_local(Path(target), path)
    with file_system(path) as (files, there):
        if not is_object_store(files) and "memory" not in protocols(files):
            return False
        files.cp_file(files._strip_protocol(str(target)), there)
        return True


def _link_local(target: Path, path: Path) -> bool:
    # The name follows from the path, so the next process removes the file of a killed one.
    temporary = path.with_name(f".{path.name}.link")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(target.absolute(), path.parent.absolute()))
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    try:
        temporary.replace(path)
    except IsADirectoryError:
        temporary.unlink()
        return False
    local.sync_directory(path.parent)
    return True


def check_is_new(target: str | Path) -> None:
    """Raise if a path already exists.

    Raises:
        CheckpointSaveError: something is at `target`.
    """
    if os.path.lexists(target):
        raise CheckpointSaveError(
            f"{str(target)!r} is there already: remove it first, or give another path"
        )
