"""Files at URLs, by fsspec: what `storage` does with them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError

# There an object appears when its upload is completed, all at once.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"})


@contextmanager
def file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and what it calls the path there."""
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
    """Return what the URLs of a file system begin with."""
    protocol = files.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def is_object_store(files: Any) -> bool:
    """Return whether an object appears there when its upload is completed, all at once."""
    return not _OBJECT_STORES.isdisjoint(protocols(files))


def fetch(url: str) -> int:
    """Copy what a URL leads to into a local file without a name; return its descriptor."""
    with file_system(url) as (files, there):
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
