"""How the ranks that write one checkpoint tell each other how it goes."""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from torch.distributed import DistStoreError

from stratagem.errors import CheckpointSaveError
from stratagem.strategies import Ranks

T = TypeVar("T")


class Exchange(Protocol):
    """The protocol to gather bytes on rank 0 and broadcast its answer; `Ranks` implements it."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks, on rank 0; [] on the others."""

    def broadcast(self, data: Any) -> Any:
        """Return rank 0's weights-only-safe data on every rank."""


# A rank that lives writes its share in this time.
_PATIENCE = timedelta(hours=1)
# A value of torch's TCPStore has 8 MB at most.
_PIECE = 4 << 20


class StoreExchange:
    """Exchanges data through the store of the ranks, from a thread beside training.

    All ranks create it together. A collective in the process group of training would wait for the
    next step of the other ranks, which wait for this thread; the store answers at once. The store
    itself waits for missing keys, so that a rank sends a few requests in each round, whatever the
    number of ranks and the time of the slowest rank.

    A round is a `gather_bytes` and a `broadcast`, on every rank.

    Args:
        ranks: the ranks that save together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._store = ranks.store()
        self._store.set_timeout(_PATIENCE)
        self._rank = ranks.global_rank
        self._world_size = ranks.world_size
        # Another one in this store, earlier or later, has other keys.
        self._name = ranks.broadcast(secrets.token_hex(8))
        self._round = 0
        self._answered: list[str] = []
        """The keys of the last answer."""
        self._awaited = 0
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = False

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Send `data` to rank 0; on rank 0, wait for the data of all ranks and return it.

        Raises:
            CheckpointSaveError: no data of a rank arrived within an hour, or `stop` was called.
        """
        self._round += 1
        if self._rank > 0:
            self._send(str(self._rank), data)
            return []
        return [data, *self._wait_for(self._receive_all)]

    def broadcast(self, data: Any) -> Any:
        """Return rank 0's weights-only-safe data on every rank.

        Raises:
            CheckpointSaveError: no data of rank 0 arrived within an hour, or `stop` was called.
        """
        if self._rank > 0:
            self._awaited = 0
            answer, _ = self._wait_for(lambda: self._receive("answer"))
            return json.loads(answer)
        for key in self._answered:
            # Every rank has read it: all have sent their later messages.
            self._store.delete_key(key)
        self._answered = self._send("answer", json.dumps(data).encode())
        return data

    def stop(self) -> None:
        """Make current and future calls that wait for a rank raise an error."""
        self._stopped = True
        self._outcomes.put(None)

    def _send(self, name: str, data: bytes) -> list[str]:
        keys = []
        # The first piece is sent last: it has the number of pieces, and the receiver waits for it.
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] or [b""]
        for number, piece in reversed([*enumerate(pieces)]):
            keys.append(self._key(name, number))
            self._store.set(keys[-1], len(pieces).to_bytes(8, "little") + piece)
        return keys

    def _receive(self, name: str) -> tuple[bytes, list[str]]:
        """Wait for what `_send` sends; return it, and its keys."""
        keys = [self._key(name, 0)]
        first = self._store.get(keys[0])
        keys += [self._key(name, n) for n in range(1, int.from_bytes(first[:8], "little"))]
        pieces = [first, *(self._store.get(key) for key in keys[1:])]
        return b"".join(piece[8:] for piece in pieces), keys

    def _receive_all(self) -> list[bytes]:
        received = []
        for rank in range(1, self._world_size):
            self._awaited = rank
            data, keys = self._receive(str(rank))
            received.append(data)
            for key in keys:
                self._store.delete_key(key)
        return received

    def _key(self, name: str, piece: int) -> str:
        return f"{self._name}/{self._round}/{name}/{piece}"

    def _wait_for(self, receive: Callable[[], T]) -> T:
        """Return what `receive` does, unless `stop` is called before it."""

        def call() -> None:
            try:
                self._outcomes.put((receive(), None))
            except RuntimeError as error:  # torch's errors of a store
                self._outcomes.put((None, error))

        if not self._stopped:
            # A thread of its own: nothing else ends a wait in a store.
            threading.Thread(target=call, name="stratagem-save-wait", daemon=True).start()
        outcome = self._outcomes.get()
        if self._stopped or isinstance(outcome[1], DistStoreError):
            raise CheckpointSaveError(
                f"rank {self._awaited} has not written its share of a checkpoint, so nothing was "
                "saved"
                if self._rank == 0
                else "rank 0 has not said that all ranks have written their shares of a "
                "checkpoint, so it may not have been saved"
            )
        result, error = outcome
        if error is not None:
            raise error
        return cast("T", result)
