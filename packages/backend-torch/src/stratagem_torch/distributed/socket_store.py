"""SocketStore: a key-value store of the ranks on one node, which no other user can reach.

torch's TCPStore answers any user that connects to its port. Its FileStore keeps every value that a
key has had in its file, which therefore grows, and reads the file every 10 ms while it waits.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stratagem_torch.launch.network import UNIX_FAMILY

_LENGTH = 4
"""Bytes of the length before each message, a list in JSON."""
_RETRY = 0.01
"""Seconds between two attempts to connect, before the server listens."""
_SEND_TIME = 4.0
"""Seconds in which a rank takes an answer; one that is stopped must not stop the server."""
_MOST = 1 << 20

_Request = tuple[str, Sequence[str], Sequence[str], float]


class SocketStore:
    """A connection to a `StoreServer`, with the methods of torch's stores.

    A connection serves one request at a time, from any thread.

    Args:
        path: of the server's socket.
        timeout: how long a request waits for a key, and this call for the server.
        prefix: begins every key.

    Raises:
        torch.distributed.DistNetworkError: the server has ended, or does not listen in time.
        torch.distributed.DistStoreError: a key was not set in time.
    """

    def __init__(self, path: str, timeout: timedelta, prefix: str = "") -> None:
        self._connection = _Connection(path, timeout.total_seconds())
        self.path = path
        self._timeout = timeout
        self._prefix = prefix

    def clone(self) -> SocketStore:
        """Return the same store with a connection of its own."""
        return SocketStore(self.path, self._timeout, self._prefix)

    def prefixed(self, prefix: str) -> SocketStore:
        """Return the part of the store whose keys begin with a prefix, on this connection."""
        part = object.__new__(SocketStore)
        part.__dict__ |= self.__dict__ | {"_prefix": f"{self._prefix}{prefix}/"}
        return part

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a request waits for a key."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._call("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        self._call("set", keys, values)

    def append(self, key: str, value: str | bytes) -> None:
        """Add text to the end of a key's value, which is "" at first."""
        self._call("append", [key], [value])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return the sum."""
        return int(self._call("add", [key], [str(amount)])[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is the expected one ("": none); return its value after that."""
        return self._call("compare_set", [key], [expected, desired])[0]

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self._call("get", [key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys, and return their values."""
        return self._call("get", keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._call("wait", keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._call("check", keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._call("delete", [key]))

    def _call(
        self,
        name: str,
        keys: Sequence[str],
        values: Sequence[str | bytes] = (),
        timeout: timedelta | None = None,
    ) -> list[bytes]:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        texts = [one.decode("latin-1") if isinstance(one, bytes) else _text(one) for one in values]
        answer = self._connection.ask((name, [self._prefix + key for key in keys], texts, seconds))
        if isinstance(answer, str):
            raise dist.DistStoreError(answer)
        return [one.encode("latin-1") for one in answer]


class _Connection:
    """A connection to the server. An interrupted request ends it, and the next one connects."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = _connect(path, seconds)

    def __del__(self) -> None:
        if (connection := getattr(self, "_socket", None)) is not None:
            connection.close()

    def ask(self, request: _Request) -> list[str] | str:
        with self._lock:
            connection = self._socket or _connect(self._path, 0.0)
            self._socket = None
            try:
                connection.sendall(_message(request))
                answer: list[str] | str = json.loads(_received(connection))
                self._socket = connection
            except OSError as error:
                raise dist.DistNetworkError(f"the store has ended with its rank: {error}") from None
            finally:
                if self._socket is None:
                    connection.close()
            return answer


def _connect(path: str, seconds: float) -> socket.socket:
    end = time.monotonic() + seconds
    while True:
        connection = socket.socket(UNIX_FAMILY)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise dist.DistNetworkError(f"rank 0's store cannot be reached: {error}") from None
        time.sleep(_RETRY)


class StoreServer:
    """Serves `SocketStore` from a thread, until the process ends.

    Args:
        path: of the socket, in a folder that only this user can enter.
    """

    def __init__(self, path: str) -> None:
        self._values: dict[str, str] = {}
        self._received: dict[socket.socket, bytearray] = {}
        self._waiting: dict[socket.socket, tuple[_Request, float]] = {}
        self._listener = socket.socket(UNIX_FAMILY)
        self._listener.bind(path)
        self._listener.listen(4096)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="stratagem-store", daemon=True).start()

    def _serve(self) -> None:
        while True:
            ends = [end for _, end in self._waiting.values()]
            # torch's longest timeout is longer than a selector's.
            pause = min(max(min(ends) - time.monotonic(), 0.0), 3600.0) if ends else None
            for key, _ in self._selector.select(pause):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.fileobj)
            for connection, (request, end) in [*self._waiting.items()]:
                self._answer(connection, request, end)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone, or this process has too many files open
        connection.settimeout(_SEND_TIME)
        self._received[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Any) -> None:
        try:
            data = connection.recv(_MOST)
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        received = self._received[connection]
        received += data
        size = _LENGTH + int.from_bytes(received[:_LENGTH], "little")
        if len(received) >= size:
            request = json.loads(received[_LENGTH:size])
            received.clear()  # the next request comes after the answer
            self._answer(connection, request, time.monotonic() + request[3])

    def _answer(self, connection: socket.socket, request: _Request, end: float) -> None:
        """Answer a request, or let it wait for its keys."""
        name, keys, values, seconds = request
        is_waiting = name in ("get", "wait") and not all(key in self._values for key in keys)
        if is_waiting and time.monotonic() < end:
            self._waiting[connection] = request, end
            return
        self._waiting.pop(connection, None)
        late = f"timeout: {', '.join(keys)} not set within {seconds:g} s"
        answer = late if is_waiting else _apply(self._values, name, keys, values)
        try:
            connection.sendall(_message(answer))
        except OSError:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._waiting.pop(connection, None)
        del self._received[connection]
        self._selector.unregister(connection)
        connection.close()


def _apply(
    stored: dict[str, str], name: str, keys: Sequence[str], values: Sequence[str]
) -> list[str] | str:
    """Apply a request to the values; return its answer, or an error's text.

    An empty list is a false answer.
    """
    key = keys[0]
    if name == "get":
        return [stored[key] for key in keys]
    if name == "check":
        return ["yes"] if all(key in stored for key in keys) else []
    if name == "delete":
        return [] if stored.pop(key, None) is None else ["yes"]
    if name == "set":
        stored.update(zip(keys, values, strict=True))
    elif name == "append":
        stored[key] = stored.get(key, "") + values[0]
    elif name == "add":
        if not (former := stored.get(key, "0")).lstrip("-").isdecimal():
            return (
                f"add({key!r}): expected a key that holds a number, received {former[:20]!r}: "
                "set the number, or use another key"
            )
        stored[key] = str(int(former) + int(values[0]))
    elif name == "compare_set":
        if stored.get(key, "") != values[0]:
            return [stored.get(key, values[0])]
        stored[key] = values[1]
    return [stored.get(key, "")] if name in ("add", "compare_set") else []


def _text(value: str) -> str:
    return value.encode().decode("latin-1")


def _message(content: Any) -> bytes:
    data = json.dumps(content).encode()
    return len(data).to_bytes(_LENGTH, "little") + data


def _received(connection: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(connection, _LENGTH), "little")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := connection.recv(min(size - len(data), _MOST))):
            raise ConnectionResetError("connection closed")
        data += piece
    return bytes(data)


def prefixed(store: Any, prefix: str) -> Any:
    """Return the part of any store whose keys begin with a prefix."""
    if isinstance(store, SocketStore):
        return store.prefixed(prefix)
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
