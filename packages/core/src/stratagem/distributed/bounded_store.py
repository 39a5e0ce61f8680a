"""BoundedStore: a torch.distributed store whose calls end, also when its host cannot be reached."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class BoundedStore:
    """Makes each call to a store end in time.

    A store's own timeout limits how long it waits for a key. Nothing limits how long it waits for
    an answer over a connection whose other side is gone without a word, as when a cable is pulled:
    a rank then hung for good where it wanted to say why it had failed.

    Args:
        store: the store; used by this object only.
        seconds: how long a call may take.

    Raises:
        RuntimeError: by a call that takes longer, and by those after it until the store answers.

    Example:
        >>> import torch.distributed as dist
        >>> store = BoundedStore(dist.HashStore(), seconds=4)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
    """

    def __init__(self, store: Any, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._waiting = threading.Lock()
        """Held while a call is under way, also one that nobody waits for any more."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, which is there."""
        value: bytes = self._call(self._store.get, key)
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._call(self._store.check, keys))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self._waiting.acquire(blocking=False):
            raise RuntimeError("the store has not answered an earlier call yet")
        answers: queue.SimpleQueue[tuple[Any, RuntimeError | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put((function(*args), None))
            except RuntimeError as error:
                answers.put((None, error))
            finally:
                self._waiting.release()

        # A thread for each call, which may never end, and must not keep the process.
        threading.Thread(target=call, name="stratagem-store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            raise RuntimeError(f"the store has not answered within {self._seconds} s") from None
        if error is not None:
            raise error
        return value
