"""AnnouncedPortEnvironment: ranks of SLURM, MPI and LSF read rank 0's port from a file.

Rank 0 listens on a free port first. Then it writes the port into a file that only this user can
read or write, in a folder that the ranks share. No other process is asked for the port, so no
other user can answer, delay the answer, or take the port.

A killed run leaves its file behind. Rank 0 therefore rewrites the file again and again, each time
with a new random number, and the other ranks believe only a file that changes while they watch.
This compares no clocks and needs no file locks, which many shared file systems do not support.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stratagem import system
from stratagem.environments import ClusterEnvironment
from stratagem.errors import ConfigurationError
from stratagem.launch import STARTED_IN, at_end_of_rank
from stratagem_torch.launch import network

_RANK_0_TIMEOUT = 600.0
"""Seconds that a rank waits for rank 0. The cluster starts both at the same time."""
_INTERVAL = 0.2
"""Seconds between two reads, and between the first writes."""
_LONGEST_INTERVAL = 60.0
_LONGEST_TEXT = 5_000
"""Characters that are read: two numbers and a path."""


class AnnouncedPortEnvironment(ClusterEnvironment):
    """A cluster that knows rank 0's host but no port: rank 0 chooses one and writes it to a file.

    The file is in `~/.cache/stratagem` (or $XDG_CACHE_HOME). If there are several nodes, it is also
    in the folder where the job was started: the nodes of a cluster usually share one of the two.
    MASTER_PORT takes precedence over the file.

    A subclass implements `_token`.
    """

    def __init__(self) -> None:
        self._main_port: int | None = None
        self._store_file: str | None = None
        self._listener: socket.socket | None = None
        self._announcement: _Announcement | None = None

    def _token(self) -> str:
        """Return a name of this run that no simultaneous run has; the same on every rank."""
        raise NotImplementedError

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the cluster has started this process, which it does by default."""
        return True

    def node_rank(self) -> int:
        """Return the node's rank, where each node has as many ranks."""
        return self.global_rank() // self.local_world_size()

    @property
    def _one_node(self) -> bool:
        return self.world_size() == self.local_world_size()

    @property
    def main_port(self) -> int:
        """The port on which rank 0 listens; waits until rank 0 has written it.

        Raises:
            ConfigurationError: no shared folder can hold the file, or rank 0 did not write it.
        """
        if "MASTER_PORT" in os.environ:
            return self._number("MASTER_PORT")
        if self._main_port is None:
            paths = _paths(self._token(), one_node=self._one_node)
            if self.global_rank() == 0:
                self._main_port = self._announce(paths)
            else:
                self._main_port, self._store_file = _wait(paths)
        return self._main_port

    @property
    def store_file(self) -> str | None:
        """Path of the file by which ranks on one node meet, which rank 0 has written too."""
        if "MASTER_PORT" in os.environ:
            return super().store_file
        _ = self.main_port
        return self._store_file

    def _announce(self, paths: Sequence[Path]) -> int:
        address = network.LOOPBACK
        if not self._one_node:
            address = network.address_to_listen_on(self.main_address)
        self._listener = network.listen(address)
        port = int(self._listener.getsockname()[1])
        if self.world_size() > 1:
            self._store_file = network.make_store_file() if self._one_node else None
            # Called after the process group is left, which is joined later.
            at_end_of_rank(partial(network.remove_store_file, self._store_file))
            self._announcement = _Announcement(
                paths, port, self._store_file, only_first=self._one_node
            )
        return port

    def take_listener(self) -> int | None:
        """Return the socket of `main_port`, on rank 0 and once."""
        listener, self._listener = self._listener, None
        return super().take_listener() if listener is None else listener.detach()

    def teardown(self) -> None:
        """Remove the file with the port, and close the socket if nobody has taken it."""
        if self._announcement is not None:
            self._announcement.close()
        if self._listener is not None:
            self._listener.close()
        self._announcement = self._listener = None


def _paths(token: str, *, one_node: bool) -> list[Path]:
    """Return where the file may be."""
    name = f".stratagem-{hashlib.sha256(token.encode()).hexdigest()[:32]}.port"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    folders = [f"{cache}/stratagem", STARTED_IN, tempfile.gettempdir() if one_node else None]
    # A user without a home has a folder that begins with "~".
    return [Path(folder) / name for folder in folders if folder and Path(folder).is_absolute()]


class _Announcement:
    """Rank 0's port and the path of its store, in files that a thread rewrites until `close`.

    Args:
        paths: the files.
        port: the port.
        store: the path of the store's file, if the ranks meet by one.
        only_first: write only the first file that can be written.

    Raises:
        ConfigurationError: no file can be written.
    """

    def __init__(
        self, paths: Sequence[Path], port: int, store: str | None, *, only_first: bool
    ) -> None:
        self._port = port
        self._store = store or ""
        self._written: dict[Path, str] = {}
        problems = []
        for path in paths:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_forgotten(path.parent)
                self._write(path)
            except OSError as error:
                problems.append(f"{path.parent}: {error.strerror or error}")
            if self._written and only_first:
                break
        if not self._written:
            raise ConfigurationError(
                "rank 0 found no folder in which to write its port for the other ranks "
                f"({'; '.join(problems)}): set MASTER_ADDR to the host of rank 0 and MASTER_PORT "
                "to a free port there, on every rank"
            )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, name="stratagem-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the files."""
        self._closed.set()
        self._thread.join()
        for path, text in self._written.items():
            # A later run of the same name may have replaced the file.
            if _read(path) == text:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _rewrite(self) -> None:
        began = time.monotonic()
        # The interval grows with time: a late rank waits little longer, and a long run writes
        # little.
        while not self._closed.wait(
            min(max(_INTERVAL, (time.monotonic() - began) / 20), _LONGEST_INTERVAL)
        ):
            for path in self._written:
                with contextlib.suppress(OSError):  # the next attempt may succeed
                    self._write(path)

    def _write(self, path: Path) -> None:
        text = f"{self._port} {secrets.token_hex(16)} {self._store}"
        # mkstemp creates the file with mode 0600. The atomic rename hides incomplete files from
        # readers.
        descriptor, name = tempfile.mkstemp(".port", f"{path.stem}-", path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            if _read(temporary) != text:
                raise OSError("this file system does not protect a file from other users")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._written[path] = text


def _wait(paths: Sequence[Path]) -> tuple[int, str | None]:
    """Return the port and the store's path in a file that changes, as of a running rank 0."""
    first: dict[Path, str] = {}
    deadline = time.monotonic() + _RANK_0_TIMEOUT
    while time.monotonic() < deadline:
        for path in paths:
            text = _read(path)
            if text is not None and text != first.setdefault(path, text):
                port, _, store = text.split(" ", 2)
                return int(port), store or None
        time.sleep(_INTERVAL)
    folders = " or ".join(str(path.parent) for path in paths)
    raise ConfigurationError(
        f"rank 0 did not write its port into a file in {folders} within {_RANK_0_TIMEOUT:.0f} s: "
        "see whether rank 0 has failed; if the nodes share no such folder, set MASTER_ADDR to the "
        "host of rank 0 and MASTER_PORT to a free port there, on every rank"
    )


def _read(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist or other users can access it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | system.NO_LINK | system.NO_WAIT)
        with os.fdopen(descriptor) as file:
            about = os.fstat(descriptor)
            is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == system.user()
            if not is_ours or about.st_mode & 0o077 or about.st_nlink != 1:
                return None
            return file.read(_LONGEST_TEXT)
    except (OSError, ValueError):
        return None


def _remove_forgotten(folder: Path) -> None:
    for path in folder.glob(".stratagem-*.port"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > network.FORGOTTEN_AFTER:
                path.unlink()
