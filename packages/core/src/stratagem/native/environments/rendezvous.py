"""How ranks that share no port find rank 0: the standard library only.

A port that is computed, from a job's number say, may be taken: by another program, by another step
of the same job, by another job on the same node. So rank 0 listens on whatever port is free, and
announces it to the others by a *beacon*: the first free one of a few computed ports, where it
answers those who know the run's token, and nobody else. The others try these ports in turn until
one answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import zlib

from stratagem.errors import ConfigurationError
from stratagem.interfaces.cluster_environment import ClusterEnvironment

_CANDIDATES = 16
# Below the ports that Linux hands out by itself (32768 and up), above those of most services.
_FIRST_PORT, _LAST_PORT = 20000, 32000
_ANSWER_TIMEOUT = 5.0
"""Seconds for a connection and its answer: what listens there may be another kind of service."""
_PAUSE = 0.2
"""Seconds between two rounds over the ports."""
_RANK_0_TIMEOUT = 600.0
"""Seconds that a rank waits for rank 0, which the cluster has started at the same time."""


class AnnouncedPortEnvironment(ClusterEnvironment):
    """A cluster that names rank 0's host, but no port: rank 0 announces a free one.

    A subclass says `_token`. MASTER_PORT goes before what is announced.
    """

    def __init__(self) -> None:
        self._main_port: int | None = None
        self._listener: socket.socket | None = None

    def _token(self) -> str:
        """Return what this run has and no other that runs at the same time; alike on every rank."""
        raise NotImplementedError

    @property
    def main_port(self) -> int:
        """Where rank 0 listens; waits until rank 0 has announced it."""
        if "MASTER_PORT" in os.environ:
            return self._number("MASTER_PORT")
        if self._main_port is None:
            if self.global_rank() == 0:
                self._listener = announce(self._token(), self.world_size() - 1)
                self._main_port = int(self._listener.getsockname()[1])
            else:
                self._main_port = find(self.main_address, self._token(), _RANK_0_TIMEOUT)
        return self._main_port

    def take_listener(self) -> int | None:
        """Return the socket of `main_port`, on rank 0 and once."""
        listener, self._listener = self._listener, None
        return super().take_listener() if listener is None else listener.detach()


def ports_of(token: str) -> list[int]:
    """Return the ports where the beacon of a token may be, in the order in which to try them.

    Example:
        >>> ports_of("slurm 7.0") == ports_of("slurm 7.0")
        True
    """
    first = zlib.crc32(token.encode()) % (_LAST_PORT - _FIRST_PORT - _CANDIDATES)
    return [_FIRST_PORT + first + index for index in range(_CANDIDATES)]


def listen_on_any_interface(port: int = 0) -> socket.socket:
    """Return a socket that listens on every interface, for IPv4 and, where there is one, IPv6.

    Raises:
        OSError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=dual)


def announce(token: str, ranks: int) -> socket.socket:
    """Open rank 0's port and announce it to the other ranks, in a thread.

    Args:
        token: names the run; no other run at the same time has it.
        ranks: how many will ask.

    Returns:
        The socket that listens on the port that is announced.

    Raises:
        ConfigurationError: all candidate ports are taken.
    """
    beacon = _beacon(token) if ranks else None
    listener = listen_on_any_interface()
    if beacon is not None:
        thread = threading.Thread(
            target=_answer,
            args=(beacon, token, listener.getsockname()[1], ranks),
            name="stratagem-beacon",
            daemon=True,
        )
        thread.start()
    return listener


def find(address: str, token: str, timeout: float) -> int:
    """Return the port that rank 0 has announced.

    Args:
        address: rank 0's host.
        token: as it was announced.
        timeout: seconds to wait for rank 0.

    Raises:
        ConfigurationError: nobody has answered in that time.
    """
    deadline = time.monotonic() + timeout
    problem = ""
    while time.monotonic() < deadline:
        for port in ports_of(token):
            try:
                return _ask(address, port, token)
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        time.sleep(_PAUSE)
    ports = ports_of(token)
    raise ConfigurationError(
        f"rank 0 was not found on {address!r} within {timeout:.0f} s (it answers on one of the "
        f"ports {ports[0]} to {ports[-1]}; the last of them: {problem}): see what became of rank "
        "0, or set MASTER_ADDR and MASTER_PORT to where it can be reached"
    )


def _beacon(token: str) -> socket.socket:
    ports = ports_of(token)
    for port in ports:
        with contextlib.suppress(OSError):
            return listen_on_any_interface(port)
    raise ConfigurationError(
        f"the ports {ports[0]} to {ports[-1]} are all taken on this node, so that rank 0 cannot "
        "tell the others where it listens: set MASTER_PORT to a free port"
    )


def _answer(beacon: socket.socket, token: str, port: int, ranks: int) -> None:
    expected = f"{token}\n".encode()
    with beacon:
        while ranks:
            connection, _ = beacon.accept()
            # One that asks wrongly, or goes away, is none of ours.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ANSWER_TIMEOUT)
                with connection.makefile("rb") as lines:
                    if lines.readline(len(expected) + 1) == expected:
                        connection.sendall(f"{port}\n".encode())
                        ranks -= 1


def _ask(address: str, port: int, token: str) -> int:
    with socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT) as connection:
        connection.sendall(f"{token}\n".encode())
        with connection.makefile("rb") as lines:
            return int(lines.readline(16))
