"""Claims: two runs that save in one folder never choose the same name."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from stratagem.storage import paths

# A claim at a URL that its owner did not give back counts for so long, in seconds.
_FORGOTTEN_AFTER = 24 * 3600

_held: set[int] = set()
"""Descriptors of locked markers. A child of this process would keep the locks when it is dead."""


def _let_go_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


class Claim:
    """A name that is this process's own until `release`.

    Locally a locked file beside it says so: the kernel drops the lock of a process that dies. At a
    URL it is an object in `.claims`, which nobody else has when its owner looks.

    Make one by `claim`.

    Attributes:
        path: what is claimed.
        ends_with_process: whether the claim of a process that was killed is gone.
    """

    def __init__(
        self, path: paths.Location, marker: paths.Location, descriptor: int | None
    ) -> None:
        self.path = path
        self._marker = marker
        self._descriptor = descriptor
        self.ends_with_process = isinstance(path, Path)

    def release(self) -> None:
        """Give the name back: by now something is there, or nothing shall be."""
        # Before the lock is let go of, so that nobody locks a file that is not there any more.
        paths.remove(self._marker)
        if self._descriptor is not None and self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def claim(path: str | os.PathLike[str], *, may_exist: bool = False) -> Claim | None:
    """Return a claim on a name, or None: something is there, or another process has claimed it.

    Args:
        path: the name.
        may_exist: something may be there, which is this process's own.

    Example:
        >>> import tempfile
        >>> from stratagem.storage.claims import claim
        >>> path = f"{tempfile.mkdtemp()}/epoch=0.ckpt"
        >>> first, second = claim(path), claim(path)
        >>> second is None
        True
        >>> first.release()
    """
    path = paths.at(path)
    if isinstance(path, Path):
        return _claim_local(path, may_exist)
    return _claim_remote(path, may_exist)


def _claim_local(path: Path, may_exist: bool) -> Claim | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    marker = path.with_name(f".{path.name}.claim")
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(marker, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            pass  # a file system without locks: two runs at once need folders of their own
        if os.fstat(descriptor).st_nlink:
            break
        # Its owner released it between the two.
        os.close(descriptor)
    _held.add(descriptor)
    claimed = Claim(path, marker, descriptor)
    if not may_exist and os.path.lexists(path):
        claimed.release()
        return None
    return claimed


def _remove_leftovers(folder: Path) -> None:
    """Remove the markers of processes that were killed."""
    for marker in folder.glob(".*.claim"):
        try:
            descriptor = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it was released just now, or is somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker.unlink(missing_ok=True)
        except OSError:
            pass  # its owner lives, or nobody can tell
        finally:
            os.close(descriptor)


def _claim_remote(url: str, may_exist: bool) -> Claim | None:
    name = paths.name_of(url)
    if not may_exist and paths.exists(url):
        return None
    folder = paths.join(paths.parent(url), ".claims")
    marker = paths.join(folder, f"{name}.{secrets.token_hex(8)}")
    paths.write(marker, b"claimed")
    claimed = Claim(url, marker, None)
    # Each writes, then looks: of two at once, at least the later one sees the other.
    others = [
        entry
        for entry in paths.entries(folder)
        if paths.name_of(entry.path).rpartition(".")[0] == name
        and entry.path != marker
        and time.time() - entry.modified < _FORGOTTEN_AFTER
    ]
    if others or (not may_exist and paths.exists(url)):
        claimed.release()
        return None
    return claimed
