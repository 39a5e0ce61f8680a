"""Where files lie: a local path, or a URL that fsspec knows ("s3://bucket/run/last.ckpt").

The only place that asks which of the two a path is. Local paths are `Path`s and URLs are `str`s,
since `pathlib` makes "s3:/bucket" of "s3://bucket"; `at` makes one of them of what a user gives.
fsspec is imported when the first URL comes up.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from stratagem.errors import ConfigurationError

Location = Path | str
"""A local path, or a URL."""

# There an object appears when its upload is completed, all at once.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"})
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
# What a file system says that has no symbolic links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL.

    Example:
        >>> from stratagem.storage import is_url
        >>> is_url("s3://bucket/run"), is_url("/data/run")
        (True, False)
    """
    return "://" in os.fspath(path)


def at(path: str | os.PathLike[str]) -> Location:
    """Return a `Path` for what is local, a `str` for a URL.

    Raises:
        ConfigurationError: it is a URL that has gone through `pathlib`.
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


# -- names


def join(folder: str | os.PathLike[str], name: str) -> Location:
    """Return the path of `name` in a folder."""
    folder = at(folder)
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def parent(path: str | os.PathLike[str]) -> Location:
    """Return the folder that something lies in."""
    path = at(path)
    return path.parent if isinstance(path, Path) else path.rpartition("/")[0]


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path."""
    return os.fspath(path).rstrip("/").rpartition("/")[2]


def absolute(path: str | os.PathLike[str]) -> Location:
    """Return a path that does not depend on the working directory."""
    path = at(path)
    return path.absolute() if isinstance(path, Path) else path


def relative(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Return `path` as seen from `folder`; as it is, where it lies elsewhere."""
    whole, beginning = str(absolute(path)), f"{absolute(folder)}/"
    return whole[len(beginning) :] if whole.startswith(beginning) else whole


# -- looking


@dataclass(frozen=True)
class Entry:
    """Something in a folder.

    Attributes:
        path: where; what a symbolic link leads to, where it is one.
        modified: when, in seconds since 1970; 0: the file system does not tell.
        is_directory: whether it is one.
    """

    path: Location
    modified: float
    is_directory: bool


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether something is there; False for a link to what is gone."""
    path = at(path)
    if isinstance(path, Path):
        return path.exists()
    with _remote(path) as (files, there):
        return bool(files.exists(there))


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is there; on an object store, objects under that name."""
    path = at(path)
    if isinstance(path, Path):
        return path.is_dir()
    with _remote(path) as (files, there):
        return bool(files.isdir(there))


def target_of(path: str | os.PathLike[str]) -> Location:
    """Return what a symbolic link leads to, and any other path as it is."""
    path = at(path)
    if isinstance(path, Path) and path.is_symlink():
        return path.parent / path.readlink()
    return path


def entries(folder: str | os.PathLike[str]) -> list[Entry]:
    """Return what is in a folder, but for hidden names; nothing where there is no folder."""
    folder = at(folder)
    if not isinstance(folder, Path):
        return _remote_entries(folder)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        target = Path(target_of(path))
        try:
            found.append(Entry(target, target.stat().st_mtime, target.is_dir()))
        except FileNotFoundError:
            # Of a link, that it is broken is worth saying; a file was removed just now.
            if path.is_symlink():
                found.append(Entry(target, path.lstat().st_mtime, False))
    return found


def _remote_entries(folder: str) -> list[Entry]:
    with _remote(folder) as (files, there):
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
    """Open a file that can be mapped into memory; what a URL leads to is fetched first.

    The copy has no name by the time it is read, so it is gone when nobody has it open any more.
    Processes of one machine that ask for a URL at the same time share one copy.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: it cannot be read, or there is no room for the copy in the directory for temporary
            files (TMPDIR).
    """
    path = at(path)
    # Unbuffered: who reads checkpoints does so in large pieces.
    if isinstance(path, Path):
        with path.open("rb", buffering=0) as file:
            yield cast("BinaryIO", file)
    else:
        with os.fdopen(_fetch(path), "rb", buffering=0) as file:
            yield cast("BinaryIO", file)


@contextmanager
def open_in_place(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file to read a small part of it, without fetching the rest."""
    path = at(path)
    if isinstance(path, Path):
        with path.open("rb") as file:
            yield file
        return
    with _remote(path) as (files, there):
        opened = files.open(there, "rb", block_size=1 << 17)
    with opened as file:
        yield file


def read(path: str | os.PathLike[str]) -> bytes:
    """Return what is in a small file."""
    path = at(path)
    if isinstance(path, Path):
        return path.read_bytes()
    with _remote(path) as (files, there):
        return bytes(files.cat_file(there))


def _fetch(url: str) -> int:
    """Copy what a URL leads to into a local file without a name; return its descriptor."""
    with _remote(url) as (files, there):
        size = files.info(there)["size"]
        key = hashlib.sha256(f"{url} {files.ukey(there)}".encode()).hexdigest()[:32]
        copy = Path(tempfile.gettempdir(), f"stratagem-{os.getuid()}-{key}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(copy, flags, 0o600)
        try:
            # Whoever has the lock fetches; the others wait, and find it whole.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if size is None or os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                files.get_file(there, f"/proc/self/fd/{descriptor}")
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"no room in {str(copy.parent)!r} for the {size} bytes of {url!r}: set TMPDIR "
                    "to a directory that has it",
                ) from error
            raise
        finally:
            # Those who have it open keep it.
            copy.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return descriptor


# -- writing


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a small file in its place in one step, so that a reader sees all of it or the old one."""
    path = at(path)
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
        return
    with RemoteFile(path) as file:
        file.write(memoryview(data))
        file.commit()


class RemoteFile:
    """Writes to a URL; `commit` lets the whole of it appear there.

    On an object store that is the completion of the upload, elsewhere the renaming of a file beside
    it. Leaving the `with` block without `commit` leaves nothing.

    Args:
        url: where to.

    Attributes:
        renamed: whether it is in its place.

    Raises:
        ConfigurationError: no file system is installed for such a URL.
        OSError: it cannot be written to.
    """

    def __init__(self, url: str) -> None:
        self.renamed = False
        self._url = url
        self._size = 0
        with _remote(url) as (files, there):
            self._appears_whole = _is_object_store(files)
            self._files, self._target, self._path = files, there, there
            if self._appears_whole:
                self._file = files.open(there, "wb", autocommit=False)
            else:
                folder = there.rpartition("/")[0]
                files.makedirs(folder, exist_ok=True)
                self._path = f"{folder}/.stratagem-{secrets.token_hex(8)}.saving"
                self._file = files.open(self._path, "wb")

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.renamed:
            return
        with _naming(self._url):
            if self._appears_whole:
                self._file.discard()
                # Otherwise it would be flushed when the interpreter closes it.
                self._file.closed = True
            else:
                self._file.close()
                self._files.rm_file(self._path)

    def write(self, data: memoryview) -> int:
        """Write all of `data`."""
        with _naming(self._url):
            self._file.write(data)
        self._size += len(data)
        return len(data)

    def commit(self) -> None:
        """Return once what was written is there.

        Raises:
            OSError: it is not.
        """
        with _naming(self._url):
            self._file.close()
            if self._appears_whole:
                self._file.commit()
            else:
                self._files.mv(self._path, self._target)
            self.renamed = True
            self._files.invalidate_cache()
            stored = self._files.info(self._target)["size"]
        if stored != self._size:
            raise OSError(f"{self._url!r} has {stored} bytes, of {self._size} that were written")


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, a link, or a directory with what is in it, if there is one."""
    path = at(path)
    if not isinstance(path, Path):
        with _remote(path) as (files, there):
            if files.exists(there):
                files.rm(there, recursive=bool(files.isdir(there)))
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(target: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    """Let `path` name what is at `target` too, in one step; what it named before is let go.

    A local path becomes a symbolic link, relative so that it moves with its folder. An object store
    makes a copy, without anything being sent.

    Returns:
        False: this file system can do neither, or a directory is at `path`.
    """
    target, path = at(target), at(path)
    if isinstance(path, Path):
        return _link_local(Path(target), path)
    with _remote(path) as (files, there):
        if not _is_object_store(files) and "memory" not in _protocols(files):
            return False
        files.cp_file(files._strip_protocol(str(target)), there)
        return True


def _link_local(target: Path, path: Path) -> bool:
    # A name that follows from the path: what a dead process left is taken away by the next one.
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
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


# -- fsspec


@contextmanager
def _remote(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and what it calls the path there."""
    try:
        from fsspec.core import url_to_fs

        files, there = url_to_fs(url)
    except ImportError as error:
        raise ConfigurationError(
            f"{url!r} needs a package that is not installed: {error}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{url!r}: {error}; expected a local path, or a URL such as s3://bucket/folder"
        ) from error
    with _naming(url):
        # Other processes write there too.
        files.invalidate_cache()
        yield files, there


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Make an OSError of whatever a file system raises: each has errors of its own."""
    try:
        yield
    except (OSError, NotImplementedError, ConfigurationError) as error:
        if isinstance(error, NotImplementedError):
            raise OSError(
                errno.ENOTSUP, f"{url!r}: this file system cannot do it: {error}"
            ) from error
        raise
    except Exception as error:
        raise OSError(f"{url!r}: {type(error).__name__}: {error}") from error


def _protocols(files: Any) -> set[str]:
    protocol = files.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _is_object_store(files: Any) -> bool:
    return not _OBJECT_STORES.isdisjoint(_protocols(files))
