"""How ranks that share a secret, but no port, find rank 0: the standard library only.

A port that is computed, from a job's number say, may be taken: by another program, by another step
of the same job, by another job on the same node. So rank 0 listens on whatever port is free, and
announces it by a *beacon*: the first free one of a few ports that follow from the secret. The
others ask at all of these at once, and go where the right answer comes from.

Anybody may connect to a beacon, and anybody may listen where one is looked for. So both sides prove
that they know the secret, without showing it, before a port is told or believed::

    rank 0:  NONCE_0
    rank n:  NONCE_N  HMAC("rank", NONCE_0, NONCE_N)
    rank 0:  PORT     HMAC("rank 0", NONCE_0, NONCE_N, PORT)
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable

from stratagem.errors import ConfigurationError
from stratagem.launch import network

_CANDIDATES = 16
# Below the ports that Linux hands out by itself (32768 and up), above those of most services.
_FIRST_PORT, _LAST_PORT = 20000, 32000
_EXCHANGE_TIMEOUT = 5.0
"""Seconds for a whole exchange: the other side may be another service, or slow on purpose."""
_MOST_CONNECTIONS = 128
"""At once; an exchange takes milliseconds, so the oldest of more is none of a rank."""
_LONGEST_LINE = 256
_PAUSE = 0.2
"""Seconds between two rounds of questions."""


def ports_of(key: bytes) -> list[int]:
    """Return the ports where the beacon of a key may be, in the order in which rank 0 tries them.

    Example:
        >>> ports_of(b"one") == ports_of(b"one"), ports_of(b"one") == ports_of(b"two")
        (True, False)
    """
    drawn = int.from_bytes(_mac(key, "ports")[:8], "big")
    first = _FIRST_PORT + drawn % (_LAST_PORT - _FIRST_PORT - _CANDIDATES)
    return [first + index for index in range(_CANDIDATES)]


class Beacon:
    """Tells those who know the key where rank 0 listens, in threads, until it is closed.

    Args:
        key: the run's.
        address: of this node, where to answer.
        port: what to tell.

    Raises:
        ConfigurationError: all candidate ports are taken.
    """

    def __init__(self, key: bytes, address: str, port: int) -> None:
        self._key = key
        self._port = port
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener = self._listen(address)
        threading.Thread(target=self._serve, name="stratagem-beacon", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        # Closing alone would not wake the thread that waits for the next one.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self, address: str) -> socket.socket:
        ports = ports_of(self._key)
        for port in ports:
            with contextlib.suppress(OSError):
                return network.listen(address, port)
        raise ConfigurationError(
            f"the ports {ports[0]} to {ports[-1]} are all taken on this node, so that rank 0 "
            "cannot tell the others where it listens: set MASTER_PORT to a free port"
        )

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # too many open files, perhaps; they are closed in time
                continue
            with self._lock:
                self._connections.append(connection)
                for oldest in self._connections[:-_MOST_CONNECTIONS]:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            answer = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            try:
                answer.start()
            except RuntimeError:
                self._forget(connection)  # no more threads allowed; it asks again

    def _answer(self, connection: socket.socket) -> None:
        # One that asks wrongly, too slowly, or goes away, is none of ours.
        with contextlib.suppress(OSError, ValueError):
            lines = _Lines(connection)
            ours = secrets.token_hex(32)
            lines.send(ours)
            theirs, proof = lines.receive()
            if hmac.compare_digest(proof, _mac(self._key, "rank", ours, theirs).hex()):
                port = str(self._port)
                lines.send(port, _mac(self._key, "rank 0", ours, theirs, port).hex())
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.remove(connection)
            connection.close()


def find(address: str, keys: Callable[[], list[bytes]], timeout: float) -> int | None:
    """Return the port that rank 0 has announced; None: nobody has proved to be rank 0 in that time.

    Args:
        address: rank 0's host.
        keys: returns the keys that rank 0 may have, as far as they are known by now.
        timeout: seconds to wait for rank 0.
    """
    deadline = time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[tuple[bytes, int], int | None]] = queue.SimpleQueue()
    asked: set[tuple[bytes, int]] = set()

    def ask(key: bytes, port: int) -> None:
        answer = None
        with contextlib.suppress(OSError, ValueError):
            answer = _ask(address, port, key)
        answers.put(((key, port), answer))

    while time.monotonic() < deadline:
        for candidate in [(key, port) for key in keys() for port in ports_of(key)]:
            # One that is silent holds up no question to another.
            if candidate not in asked:
                asked.add(candidate)
                threading.Thread(target=ask, args=candidate, daemon=True).start()
        round_ends = time.monotonic() + _PAUSE
        while (left := round_ends - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                candidate, answer = answers.get(timeout=left)
                asked.discard(candidate)
                if answer is not None:
                    return answer
    return None


def _ask(address: str, port: int, key: bytes) -> int:
    with socket.create_connection((address, port), timeout=_EXCHANGE_TIMEOUT) as connection:
        lines = _Lines(connection)
        (theirs,) = lines.receive()
        ours = secrets.token_hex(32)
        lines.send(ours, _mac(key, "rank", theirs, ours).hex())
        told, proof = lines.receive()
        if not hmac.compare_digest(proof, _mac(key, "rank 0", theirs, ours, told).hex()):
            raise ValueError("it is not rank 0")
        return int(told)


def _mac(key: bytes, *words: str) -> bytes:
    return hmac.digest(key, " ".join(words).encode(), "sha256")


class _Lines:
    """Short lines of words over a connection; all of them together within one time limit."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + _EXCHANGE_TIMEOUT

    def send(self, *words: str) -> None:
        self._limit()
        self._connection.sendall(" ".join(words).encode() + b"\n")

    def receive(self) -> list[str]:
        data = b""
        while not data.endswith(b"\n"):
            self._limit()
            more = self._connection.recv(_LONGEST_LINE)
            data += more
            if not more or len(data) > _LONGEST_LINE:
                raise ValueError("expected a line")
        return data.decode("ascii").split()

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
