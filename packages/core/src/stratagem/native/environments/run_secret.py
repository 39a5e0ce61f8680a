"""RunSecret: what only the ranks of one run know, by which they tell one another from strangers."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from stratagem.errors import ConfigurationError
from stratagem.launch.environment import STARTED_IN

SECRET_VARIABLE = "STRATAGEM_SECRET"  # noqa: S105 - its name
_LEAST_LENGTH = 16
_FORGOTTEN_AFTER = 24 * 3600
"""Seconds after which the file of a run that was killed is removed by the next run there."""


class RunSecret:
    """The secret of STRATAGEM_SECRET, or one that rank 0 leaves where only this user can read it.

    The file is in `~/.cache/stratagem` (or $XDG_CACHE_HOME), and for ranks of several nodes in the
    folder where the job was started as well: one of the two is what the nodes of a cluster share.
    Whoever reads it looks at whose it is, and that nobody else may read it.

    Args:
        token: names the run; alike on every rank, and no secret.
        one_node: whether all its ranks are on one node.

    Raises:
        ConfigurationError: STRATAGEM_SECRET is too short.
    """

    def __init__(self, token: str, *, one_node: bool) -> None:
        self._token = token.encode()
        self._one_node = one_node
        self._given = os.environ.get(SECRET_VARIABLE, "")
        if self._given and len(self._given) < _LEAST_LENGTH:
            raise ConfigurationError(
                f"{SECRET_VARIABLE} has {len(self._given)} characters: expected at least "
                f"{_LEAST_LENGTH} that nobody can guess, alike on every rank, as `openssl rand "
                "-hex 32` prints them"
            )
        self._made = secrets.token_hex(32)
        self._files: list[Path] = []

    @property
    def own_key(self) -> bytes:
        """The key that rank 0 uses."""
        return self._key(self._given or self._made)

    def share(self) -> None:
        """Leave the secret for the other ranks; on rank 0, once it answers those who know it.

        Raises:
            ConfigurationError: there is no folder where only this user can read a file.
        """
        if self._given:
            return
        problems = []
        for path in self._places():
            try:
                _write(path, self._made)
            except OSError as error:
                problems.append(f"{path.parent}: {error.strerror or error}")
                continue
            self._files.append(path)
            if self._one_node:
                return
        if not self._files:
            raise ConfigurationError(
                "rank 0 found no folder to leave the run's secret in for the other ranks "
                f"({'; '.join(problems)}): set {SECRET_VARIABLE} to the same random text on every "
                "rank, or MASTER_PORT to a port that is free on the host of rank 0"
            )

    def keys(self) -> list[bytes]:
        """Return the keys that rank 0 may have, by what is there now; [] before rank 0 is there.

        One may be of an earlier run that had the same name and was killed.
        """
        if self._given:
            return [self.own_key]
        found = (_read(path) for path in self._places())
        return list(dict.fromkeys(self._key(text) for text in found if text is not None))

    def remove(self) -> None:
        """Take the secret away, at the end of rank 0."""
        for path in self._files:
            # Not that of a later run of this name, which has replaced it.
            if _read(path) == self._made:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._files = []

    @property
    def where(self) -> str:
        """What the ranks have to share, for errors."""
        if self._given:
            return f"by {SECRET_VARIABLE}, which has to be the same on every rank"
        return "by a file in " + " or ".join(str(path.parent) for path in self._places())

    def _key(self, secret: str) -> bytes:
        return hmac.digest(secret.encode(), self._token, "sha256")

    def _places(self) -> Iterator[Path]:
        name = f".stratagem-{hashlib.sha256(self._token).hexdigest()[:32]}.secret"
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        folders = [
            f"{cache}/stratagem",
            STARTED_IN,
            tempfile.gettempdir() if self._one_node else "",
        ]
        for folder in folders:
            if folder and os.path.isabs(folder):  # noqa: PTH117 - "~" of a user without a home
                yield Path(folder) / name


def _write(path: Path, secret: str) -> None:
    """Put a file that only this user can read in the place of what an earlier run has left."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_forgotten(path.parent)
    temporary = path.with_name(f"{path.stem}-{secrets.token_hex(8)}.secret")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if _read(path) != secret:
        path.unlink(missing_ok=True)
        raise OSError("this file system does not keep a file from other users")


def _read(path: Path) -> str | None:
    """Return what such a file says; None: there is none, or it is not this user's alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        about = os.fstat(descriptor)
        is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        if not is_ours or about.st_mode & 0o077 or about.st_nlink != 1:
            return None
        try:
            return file.read(256)
        except (OSError, ValueError):
            return None


def _remove_forgotten(folder: Path) -> None:
    for path in folder.glob(".stratagem-*.secret"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _FORGOTTEN_AFTER:
                path.unlink()
