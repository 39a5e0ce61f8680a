"""Claims: two runs that save in one folder never choose the same name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from stratagem.storage import paths
from stratagem.storage.owner import FORGOTTEN_AFTER, Owner, has_ended
from stratagem.system import BINARY, NO_LINK, NO_WAIT, at_fork, lock

_held: set[int] = set()
"""Descriptors of locked markers. A child of this process would keep the locks when it is dead."""


def _let_go_in_child() -> None:
    while _held:
        os.close(_held.pop())


at_fork(after_in_child=_let_go_in_child)


class Claim:
    """A name that belongs to this process until `release`.

    Locally, a lock file beside the path marks the claim. Only one process can create it, and it
    names its owner; the lock of a killed process is void. At a URL, the claim is an object in
    `.claims` that no other process has when its owner checks.

    Create a claim with `claim`.

    Attributes:
        path: the claimed path.
        ends_with_process: whether the claim ends when its process is killed.
    """

    def __init__(
        self,
        path: paths.Location,
        markers: Mapping[paths.Location, str],
        descriptor: int | None = None,
    ) -> None:
        self.path = path
        self._markers = markers
        self._descriptor = descriptor
        self.ends_with_process = isinstance(path, Path)

    def release(self) -> None:
        """Release the claim."""
        if sys.platform == "win32":
            self._close()  # no open file can be removed
        # Names of dead owners first: see `_take`.
        for marker, mark in self._markers.items():
            if _is_there(marker, mark):
                paths.remove(marker)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None and self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def claim(
    path: str | os.PathLike[str], *, may_exist: bool = False, from_unseen: bool = False
) -> Claim | None:
    """Claim a path; return None if the path exists or another process has claimed it.

    Args:
        path: the path to claim.
        may_exist: if True, the path may exist, as a file of this process.
        from_unseen: if True, take over claims of other machines' processes, unless their lock is
            visible here. If False, such claims are valid for a day.

    Example:
        >>> import tempfile
        >>> from stratagem.storage.claims import claim
        >>> path = f"{tempfile.mkdtemp()}/epoch=0.ckpt"
        >>> first, second = claim(path), claim(path)
        >>> second is None
        True
        >>> first.release()
    """
    path = paths.to_location(path)
    if isinstance(path, Path):
        return _claim_local(path, may_exist, from_unseen)
    return _claim_remote(path, may_exist)


def _claim_local(path: Path, may_exist: bool, from_unseen: bool) -> Claim | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for marker in path.parent.glob(".*.claim"):
        # Remove the lock file of a killed process, as a process that needs its name would.
        void = marker != _marker_of(path) and (_look(marker) or ("", False))[1]
        if void and (taken := _take(_path_of(marker))):
            taken.release()
    claimed = _take(path, from_unseen)
    if claimed is not None and not may_exist and os.path.lexists(path):
        claimed.release()
        return None
    return claimed


def _marker_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def _path_of(marker: Path) -> Path:
    return marker.with_name(marker.name[1:].removesuffix(".claim"))


def _take(path: Path, from_unseen: bool = False) -> Claim | None:
    """Make the marker of a name, or the one that inherits it from an owner that is dead.

    A dead owner's marker is not replaced: several could do so, each thinking that it replaces the
    dead one's. It stays, and the name is who makes the heir's, a file named after what the dead
    one's says and no other does. Who gives a name back removes the first marker first. So whoever
    has made an heir's, and still sees all before it, is alone.
    """
    while True:
        inherited: dict[paths.Location, str] = {}
        marker = _marker_of(path)
        while (made := _make(marker)) is None:
            found = _look(marker, from_unseen)
            if found is None:
                break  # it was given back just now
            mark, is_void = found
            if not is_void:
                return None
            inherited[marker] = mark
            marker = path.with_name(f".{path.name}.{mark}.heir")
        if made is None:
            continue
        descriptor, own_mark = made
        if all(_is_there(each, mark) for each, mark in inherited.items()):
            return Claim(path, {**inherited, marker: own_mark}, descriptor)
        Claim(path, {marker: own_mark}, descriptor).release()


def _make(marker: Path) -> tuple[int, str] | None:
    """Make a marker of this process; return its descriptor and mark, or None: there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY
    try:
        descriptor = os.open(marker, flags, 0o666)
    except FileExistsError:
        return None
    _held.add(descriptor)
    with contextlib.suppress(OSError):  # a file system without locks
        lock(descriptor)
    said = f"{Owner.this()} {secrets.token_hex(8)}".encode()
    try:
        os.write(descriptor, said)
    except OSError:
        marker.unlink()
        _held.discard(descriptor)
        os.close(descriptor)
        raise
    return descriptor, _mark(said)


def _look(marker: Path, from_unseen: bool = False) -> tuple[str, bool] | None:
    """Return a marker's mark, which no other has, and whether it is void; None: there is none."""
    try:
        descriptor = os.open(marker, os.O_RDONLY | NO_LINK | NO_WAIT | BINARY)
    except FileNotFoundError:
        return None
    except OSError:
        return "", False  # another user's, perhaps
    try:
        said, modified = os.read(descriptor, 256), os.fstat(descriptor)
        owner = Owner.parse(said.decode(errors="replace").partition(" ")[0])
        # Between its making and its writing it names no owner, also after a kill.
        age = 0 if from_unseen and owner is not None else FORGOTTEN_AFTER
        is_void = has_ended(owner, descriptor, modified.st_mtime, forgotten_after=age)
        return _mark(said or str(modified.st_mtime_ns).encode()), is_void
    except OSError:
        return "", False
    finally:
        os.close(descriptor)


def _is_there(marker: paths.Location, mark: str) -> bool:
    """Whether a marker is still the one that had this mark; at a URL nobody else has its name."""
    return not isinstance(marker, Path) or (_look(marker) or ("",))[0] == mark


def _mark(said: bytes) -> str:
    return hashlib.sha256(said).hexdigest()[:16]


def _claim_remote(url: str, may_exist: bool) -> Claim | None:
    name = paths.name_of(url)
    if not may_exist and paths.exists(url):
        return None
    folder = paths.join(paths.parent(url), ".claims")
    marker = paths.join(folder, f"{name}.{secrets.token_hex(8)}")
    paths.write(marker, b"claimed")
    claimed = Claim(url, {marker: ""})
    # Each writes, then looks: of two at once, at least the later one sees the other.
    others = [
        entry
        for entry in paths.entries(folder)
        if paths.name_of(entry.path).rpartition(".")[0] == name
        and entry.path != marker
        and time.time() - entry.modified < FORGOTTEN_AFTER
    ]
    if others or (not may_exist and paths.exists(url)):
        claimed.release()
        return None
    return claimed
