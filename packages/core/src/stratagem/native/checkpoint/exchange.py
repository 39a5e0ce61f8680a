"""Exchange of records between the ranks that write one checkpoint."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.errors import CheckpointSaveError
from stratagem.interfaces.ranks import Ranks

Record = dict[str, Any]
Exchange = Callable[[Record], list[Record]]
"""Takes one rank's record, plain data; returns the records of all ranks, on every rank."""

_LOOK = 0.02  # seconds
# A rank that lives writes its share in this time, in seconds.
_PATIENCE = 3600.0


def exchange_alone(record: Record) -> list[Record]:
    """Return the one record there is."""
    return [record]


class StoreExchange:
    """Exchanges records by the ranks' store, from a thread beside training.

    A collective of the training's own group would wait for the other ranks' next step, and they for
    this thread; the store answers at once.

    Args:
        ranks: those that save together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._store = ranks.store()
        self._rank = ranks.global_rank
        self._world_size = ranks.world_size
        self._round = 0
        self._stopped = threading.Event()

    def __call__(self, record: Record) -> list[Record]:
        """Send `record` to the other ranks, and wait for theirs.

        Raises:
            CheckpointSaveError: a rank has sent nothing within an hour, or `stop` was called.
        """
        self._round += 1
        if self._round > 2:
            # Read by all: they have sent records of the round after it.
            self._store.delete_key(f"{self._round - 2}/{self._rank}")
        self._store.set(f"{self._round}/{self._rank}", json.dumps(record))
        end = time.monotonic() + _PATIENCE
        return [self._get(rank, end) for rank in range(self._world_size)]

    def stop(self) -> None:
        """Let a call that waits for a rank end with an error."""
        self._stopped.set()

    def _get(self, rank: int, end: float) -> Record:
        key = f"{self._round}/{rank}"
        while not self._store.check([key]):
            if self._stopped.wait(_LOOK) or time.monotonic() > end:
                raise CheckpointSaveError(
                    f"rank {rank} has not written its share of a checkpoint, so nothing was saved"
                )
        record: Record = json.loads(self._store.get(key))
        return record
