"""The store of the ranks on one node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from stratagem_torch.distributed.socket_store import SocketStore, StoreServer, prefixed
from stratagem_torch.launch import network

SECOND = timedelta(seconds=1)


@pytest.fixture
def path() -> Iterator[str]:
    file = network.make_store_file()
    assert file is not None
    yield f"{file}.socket"
    network.remove_store_file(file)


@pytest.fixture
def store(path: str) -> SocketStore:
    StoreServer(path)
    return SocketStore(path, SECOND)


def results(store: Any) -> list[Any]:
    """Return the answers of a store to each kind of request."""
    store.set("text", "é")
    store.append("text", b"\xff")
    store.multi_set(["one", "two"], [b"\0" * 70_000, "2"])
    return [
        *(store.get("text"), store.multi_get(["one", "two"])),
        *(store.add("number", 3), store.add("number", -1), store.get("number")),
        *(store.check(["one", "two"]), store.check(["one", "missing"])),
        *(store.compare_set("new", "", "a"), store.compare_set("new", "", "b")),
        *(store.compare_set("new", "a", "c"), store.compare_set("other", "a", "b")),
        *(store.check(["other"]), store.delete_key("new"), store.delete_key("new")),
        store.check(["new"]),
    ]


def test_the_store_answers_as_torchs_store_does(store: SocketStore) -> None:
    torchs = dist.HashStore()  # type: ignore[attr-defined]
    assert results(store) == results(torchs)
    part = prefixed(store, "part")
    assert results(part) == results(prefixed(torchs, "part"))
    assert store.get("part/number") == b"2"


def test_a_number_is_not_added_to_a_text(store: SocketStore) -> None:
    store.set("text", "a")
    with pytest.raises(dist.DistStoreError) as caught:
        store.add("text", 1)
    assert str(caught.value) == (
        "add('text'): expected a key that holds a number, received 'a': set the number, or use "
        "another key"
    )
    assert store.get("text") == b"a"  # it serves on


def test_a_request_waits_for_its_keys(store: SocketStore) -> None:
    other = store.clone()
    threading.Timer(0.1, store.set, ("late", "now")).start()
    other.wait(["late"], timedelta(seconds=20))
    assert other.get("late") == b"now"
    other.set_timeout(timedelta(seconds=0.05))
    for request in (lambda: other.get("missing"), lambda: other.wait(["missing"])):
        with pytest.raises(dist.DistStoreError) as caught:
            request()
        assert str(caught.value) == "timeout: missing not set within 0.05 s"
    assert store.get("late") == b"now"


def test_a_rank_waits_until_the_store_is_served(path: str) -> None:
    threading.Timer(0.1, StoreServer, (path,)).start()
    assert SocketStore(path, timedelta(seconds=20)).add("key", 1) == 1


def test_unreachable_store_raises_network_error(path: str, store: SocketStore) -> None:
    with pytest.raises(dist.DistNetworkError) as caught:
        SocketStore(f"{path}.other", timedelta(0))
    assert str(caught.value).startswith("rank 0's store cannot be reached: [Errno 2]")
    connection = store._connection._socket
    assert connection is not None
    connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(dist.DistNetworkError) as caught:
        store.set("key", "value")
    assert str(caught.value).startswith("the store has ended with its rank: ")


def test_a_request_that_was_interrupted_has_no_effect_on_the_next(
    store: SocketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("key", "right")
    store.set("other", "wrong")

    def interrupt(connection: socket.socket) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("stratagem_torch.distributed.socket_store._received", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.get("other")
    assert store.get("key") == b"right"


def test_a_rank_that_ends_or_stops_reading_does_not_hold_up_the_others(
    store: SocketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem_torch.distributed.socket_store._SEND_TIME", 0.1)
    stopped, gone = store.clone(), store.clone()
    store.set("large", b"0" * 4_000_000)
    for one, request in ((stopped, '["get", ["large"], [], 9]'), (gone, '["get", ["no"], [], 9]')):
        connection = one._connection._socket
        assert connection is not None
        connection.sendall(len(request).to_bytes(4, "little") + request.encode())
    gone._connection._socket.close()  # type: ignore[union-attr]
    began = time.monotonic()
    assert store.add("key", 1) == 1
    assert time.monotonic() - began < 5
