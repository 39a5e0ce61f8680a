"""StoreTransport: how a replica hands its state to one that joins, as weights-only-safe data."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs
from torchft.checkpointing import CheckpointTransport

_CHUNK = 4 * 2**20
"""Bytes of a value; a TCPStore takes at most 8 MiB."""


class StoreTransport(CheckpointTransport[dict[str, Any]]):  # type: ignore[misc]  # untyped
    """Hands states over by the store of the replica that has them.

    torchft's own transport unpickles what it receives; this one executes nothing.

    Args:
        store: this replica's.
        address: of that store, "host:port", as other replicas reach it.
        rank: this process's in its replica.
    """

    def __init__(self, store: TCPStore, address: str, rank: int) -> None:
        self._store = store
        self._address = address
        self._rank = rank
        self._kept: list[str] = []

    def metadata(self) -> str:
        """Return where the state of this rank is: "host:port/rank"."""
        return f"{self._address}/{self._rank}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Put the state into the store, where those that need it look."""
        file = io.BytesIO()
        torch.save(state_dict, file)
        data = file.getvalue()
        key = f"state/{self._rank}/{step}"
        for number, begin in enumerate(range(0, len(data), _CHUNK)):
            self._set(f"{key}/{number}", data[begin : begin + _CHUNK])
        self._set(key, str(-(-len(data) // _CHUNK)).encode())

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # strings only, in its stubs
        self._kept.append(key)

    def disallow_checkpoint(self) -> None:
        """Free the state: a step is agreed on only after all that needed it have it."""
        while self._kept:
            self._store.delete_key(self._kept.pop())

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Return the state that another replica has put into its store."""
        address, _, rank = metadata.rpartition("/")
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
        key = f"state/{rank}/{step}"
        data = b"".join(store.get(f"{key}/{i}") for i in range(int(store.get(key))))
        state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Free the state."""
        self.disallow_checkpoint()
