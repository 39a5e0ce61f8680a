"""Files at URLs, by fsspec: what `storage` does with them."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from stratagem import system
from stratagem.errors import ConfigurationError

# There an object appears when its upload is completed, all at once.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"})


@contextmanager
def file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path of the URL on that file system."""
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


def protocols(files: Any) -> set[str]:
    """Return the URL schemes of a file system."""
    protocol = files.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def is_object_store(files: Any) -> bool:
    """Return whether an object appears there when its upload is completed, all at once."""
    return not _OBJECT_STORES.isdisjoint(protocols(files))


def fetch(url: str) -> int:
    """Download a URL into a local file without a name; return its descriptor.

    Processes of one user that fetch it at the same time share the copy, in a private folder.

    Raises:
        PermissionError: other users have access to the folder.
        OSError: the URL cannot be read, or the disk is full.
    """
    with file_system(url) as (files, there):
        if os.open not in os.supports_dir_fd or system.descriptor_path(0) is None:
            raise ConfigurationError(
                f"{url!r} cannot be read: on this system no private copy can be made of what is at "
                "a URL; download it, and pass the path of the file"
            )
        size = files.info(there)["size"]
        key = hashlib.sha256(f"{url} {files.ukey(there)}".encode()).hexdigest()[:32]
        with _private_folder() as folder:
            _remove_leftovers(folder, but=key)
            descriptor = _open_own(key, os.O_RDWR | os.O_CREAT, stat.S_IFREG, folder)
            try:
                _fill(descriptor, size, partial(files.get_file, there), key, folder)
            except BaseException as error:
                os.ftruncate(descriptor, 0)  # waiting processes see an incomplete copy
                os.close(descriptor)
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise OSError(
                        errno.ENOSPC,
                        f"no room in {tempfile.gettempdir()!r} for the {size} bytes of {url!r}: "
                        "set TMPDIR to a directory that has it",
                    ) from error
                raise
    system.unlock(descriptor)
    os.lseek(descriptor, 0, os.SEEK_SET)  # on macOS, /dev/fd shares the position of a file
    return descriptor


def _fill(
    descriptor: int, size: int | None, get_file: Callable[[str], None], name: str, folder: int
) -> None:
    """Let a copy be whole: whoever has the lock fetches it, and takes its name away."""
    system.lock(descriptor)
    found = os.fstat(descriptor)
    if not found.st_nlink and found.st_size == size:
        return  # another process has fetched it; the file of a killed process still has a name
    try:
        os.ftruncate(descriptor, 0)
        get_file(str(system.descriptor_path(descriptor)))
        received = os.fstat(descriptor).st_size
        if size is not None and received != size:
            raise OSError(
                f"{received} bytes came of an object that was said to have {size}: if it is being "
                "written, load it once that is done; otherwise its server is not to be trusted"
            )
    finally:
        if found.st_nlink:
            with suppress(FileNotFoundError):  # a cleaner of temporary files was quicker
                os.unlink(name, dir_fd=folder)


@contextmanager
def _private_folder() -> Iterator[int]:
    """Yield the descriptor of this user's folder in the directory for temporary files."""
    path = Path(tempfile.gettempdir(), f"stratagem-{system.user()}")
    with suppress(FileExistsError):
        path.mkdir(0o700)
    descriptor = _open_own(str(path), os.O_RDONLY | system.DIRECTORY, stat.S_IFDIR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_own(path: str, flags: int, kind: int, folder: int | None = None) -> int:
    """Open a file or directory that belongs to this user alone and is not a link.

    The path is a name in `folder`, or an absolute path.

    Raises:
        PermissionError: the file is a link, or other users have access.
    """
    try:
        descriptor = os.open(path, flags | system.NO_LINK, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise
        why = "a link, another user's, or of another kind"
    else:
        found, user = os.fstat(descriptor), system.user()
        linked = kind == stat.S_IFREG and found.st_nlink > 1
        alone = not stat.S_IMODE(found.st_mode) & 0o077
        if (stat.S_IFMT(found.st_mode), found.st_uid) == (kind, user) and alone and not linked:
            return descriptor
        os.close(descriptor)
        why = f"user {found.st_uid}'s, with the mode {stat.S_IMODE(found.st_mode):o}"
    raise PermissionError(
        errno.EPERM,
        f"{path!r}, where copies of what is at URLs are kept, is {why}; expected one that user "
        f"{system.user()} alone may enter: remove it, or set TMPDIR to a directory of your own",
    )


def _remove_leftovers(folder: int, *, but: str) -> None:
    """Remove the copies of processes that were killed."""
    for name in os.listdir(folder):
        if name == but:
            continue  # whoever fetches it now begins it anew
        with suppress(OSError):  # it lost its name just now, or its owner lives
            descriptor = os.open(name, os.O_RDWR | system.NO_LINK, dir_fd=folder)
            with os.fdopen(descriptor, "rb", buffering=0):
                system.lock(descriptor, wait=False)
                if os.fstat(descriptor).st_nlink:
                    os.unlink(name, dir_fd=folder)


class RemoteFile:
    """Writes to a URL; `commit` makes the complete file appear there.

    On an object store, `commit` completes the upload; elsewhere it renames a temporary file beside
    the target. Leaving the `with` block without `commit` writes no file.

    Args:
        url: the target.

    Attributes:
        renamed: whether the file is at the target.

    Raises:
        ConfigurationError: no file system for such a URL is installed.
        OSError: the URL cannot be written to.
    """

    def __init__(self, url: str) -> None:
        self.renamed = False
        self._url = url
        self._size = 0
        with file_system(url) as (files, there):
            self._appears_whole = is_object_store(files)
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
        """Finish the upload, so that the file appears at the URL.

        Raises:
            OSError: the upload failed.
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
