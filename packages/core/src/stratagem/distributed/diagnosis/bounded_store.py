"""BoundedStore: a torch.distributed store whose calls end, also when its host cannot be reached."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

_Answers = queue.SimpleQueue[tuple[Any, Exception | None]]
_Call = tuple[Callable[..., Any], tuple[Any, ...], _Answers]


class BoundedStore:
    """Makes each call to a store end in time.

    A store's own timeout limits how long it waits for a key. Nothing limits how long it waits for
    an answer over a connection whose other end has disappeared, for example if a cable is pulled.
    A rank that reports its failure would then hang.

    Args:
        store: the store; its calls are made in one thread, which the first call starts.
        seconds: how long a call may take.

    Raises:
        RuntimeError: by a call that takes longer, by those after it until the store answers, and
            by those after `close`.

    Example:
        >>> import torch.distributed as dist
        >>> store = BoundedStore(dist.HashStore(), seconds=4)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
        >>> store.close()
    """

    def __init__(self, store: Any, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = threading.Lock()
        """Held while a call is under way, also one that nobody waits for any more."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call("set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several keys by one request."""
        self._call("multi_set", list(keys), list(values))

    def append(self, key: str, value: str) -> None:
        """Add text to the end of a key's value, which is "" at first."""
        self._call("append", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return the sum."""
        return int(self._call("add", key, amount))

    def get(self, key: str) -> bytes:
        """Return the value of a key, which is there."""
        value: bytes = self._call("get", key)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, which are there, by one request."""
        values: list[bytes] = self._call("multi_get", list(keys))
        return values

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._call("check", keys))

    def close(self) -> None:
        """Let go of the store; a call that is under way ends by itself."""
        self._store = None
        self._calls.put(None)

    def _call(self, name: str, *args: Any) -> Any:
        if self._store is None:
            raise RuntimeError("the store has been closed")
        if not self._waiting.acquire(blocking=False):
            raise RuntimeError("the store has not answered an earlier call yet")
        if self._thread is None:
            # A daemon: a call may never end, and must not keep the process.
            self._thread = threading.Thread(
                target=_make_calls,
                args=(self._calls, self._waiting),
                name="stratagem-store",
                daemon=True,
            )
            self._thread.start()
        answers: _Answers = queue.SimpleQueue()
        self._calls.put((getattr(self._store, name), args, answers))
        try:
            value, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            raise RuntimeError(f"the store has not answered within {self._seconds} s") from None
        if error is not None:
            raise error
        return value


def _make_calls(calls: queue.SimpleQueue[_Call | None], waiting: threading.Lock) -> None:
    """Make the calls of one store, one after another, until it is closed."""
    while (call := calls.get()) is not None:
        function, args, answers = call
        result: tuple[Any, Exception | None]
        try:
            result = function(*args), None
        except Exception as error:
            result = None, error
        # Nothing here keeps the store; and who has the answer may call again.
        del call, function
        waiting.release()
        answers.put(result)
        del result
