"""What a directory save among thousands of ranks costs rank 0 and another rank; for scale.py.

Each measure plays one rank, in this process, among ranks whose messages are made beforehand: what
is timed is its own work, copies out of the collectives' buffers included. The store is a real one.
The network is computed, at 10 Gbit/s into rank 0.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.checkpoint import DirectoryCheckpointIO, Shards
from stratagem.rng import rng_state
from stratagem.state import safe_data
from stratagem.state.rank_states import RankStates, gather_states
from stratagem.strategies import Ranks
from stratagem_torch.checkpoint.sharded.directory import _Save
from stratagem_torch.checkpoint.sharded.exchange import StoreExchange
from stratagem_torch.checkpoint.sharded.layout import encode_layout
from stratagem_torch.checkpoint.sharded.save_plan import GlobalPlan, Held
from stratagem_torch.checkpoint.sharded.shard_writer import file_of
from stratagem_torch.distributed.process_group import _padded, _unpadded

TENSORS = 1000
RECORD = {"files": {"__1234_0.distcp": [123456789, "0" * 32]}, "places": None}
"""What a rank says of its share when its chunks lie where they did in the save before."""
_BYTES_PER_SECOND = 10e9 / 8


class PlayedRanks(Ranks):
    """One of many ranks; what the others would send is given.

    Args:
        rank, world_size: which, of how many.
        messages: on rank 0, what the other ranks send it in `gather_bytes`, padded.
        answers: on the others, what `broadcast` returns, one after the other.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        messages: Sequence[Tensor] = (),
        answers: Sequence[Any] = (),
    ) -> None:
        super().__init__(global_rank=rank, world_size=world_size)
        self._messages = messages
        self._answers = [safe_data.encode(answer) for answer in answers]

    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return tensor

    def broadcast(self, data: Any, src: int = 0) -> Any:
        if self.is_global_zero:
            safe_data.encode(data)
            return data
        return safe_data.decode(self._answers.pop(0))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        _padded(data, len(data))
        if not self.is_global_zero:
            return []
        return [data, *map(_unpadded, self._messages)]

    def scatter_bytes(self, parts: Sequence[bytes]) -> bytes:
        for part in parts:
            _padded(part, TENSORS)
        return bytes([1] * TENSORS)


def state_of(rank: int, world_size: int) -> dict[str, Any]:
    """Return the checkpoint of a rank that has four rows of each tensor."""
    chunk = torch.zeros(4, 64)
    shape = (4 * world_size, 64)
    return {
        "model": {
            f"layers.{i // 4}.attention.w{i % 4}.weight": Shards(
                shape, torch.float32, [((4 * rank, 0), chunk)]
            )
            for i in range(TENSORS)
        }
    }


# -- before writing


def _messages_of_chunks(world_size: int) -> list[Tensor]:
    """Return what each rank but rank 0 sends of its chunks."""
    rows = Held.of(state_of(0, world_size)["model"]).rows(2)
    messages = []
    for rank in range(1, world_size):
        rows[:, 1] = 4 * rank
        data = safe_data.bytes_of(rows)
        messages.append(_padded(data, len(data)))
    return messages


def seconds_before_writing(rank: int, save: int, world_size: int) -> float:
    """Return how long a rank takes until it writes: in the first save (0), or the second (1)."""
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        temporary = f"{folder}/temporary"
        messages = _messages_of_chunks(world_size) if rank == 0 else []
        ranks = PlayedRanks(rank, world_size, messages, [temporary, "", temporary])
        io = DirectoryCheckpointIO()
        io.setup(ranks, "fsdp")
        for number in range(save + 1):
            state = state_of(rank, world_size)
            begin = time.perf_counter()
            one = _Save(io, state, Path(folder) / f"step={number}")
            taken.append(time.perf_counter() - begin)
            one._close()
    return taken[save]


# -- after writing


def seconds_of_layout(world_size: int) -> float:
    """Return how long rank 0 takes for `.metadata`, a disk left out."""
    tensors = Held.of(state_of(0, world_size)["model"]).tensors
    rows = Held.of(state_of(0, world_size)["model"]).rows(2).repeat(world_size, 1, 1)
    rows[:, :, 1] = 4 * torch.arange(world_size)[:, None]
    plan = GlobalPlan(tensors, rows.unbind(0))
    starts = torch.arange(TENSORS) * 3000
    plan.places = [torch.stack([starts, torch.full_like(starts, 2990)])] * world_size
    paths = {name: tuple(name.split(".")) for name, *_ in tensors}
    files = [file_of(rank) for rank in range(world_size)]
    begin = time.perf_counter()
    with Path(os.devnull).open("wb") as file:
        for piece in encode_layout(plan, files, plan.all_places(), paths):
            file.write(piece)
    return time.perf_counter() - begin


class _Clients(Ranks):
    """A rank whose store is a connection of its own."""

    def __init__(self, server: Any, rank: int, world_size: int) -> None:
        super().__init__(global_rank=rank, world_size=world_size)
        self._server = server

    def broadcast(self, data: Any, src: int = 0) -> Any:
        return "exchange"

    def store(self) -> Any:
        return self._server.clone()


def seconds_of_exchange(world_size: int) -> float:
    """Return how long rank 0 takes to hear of all ranks by a real store, once they have sent."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    own = StoreExchange(_Clients(server, 0, world_size))
    data = json.dumps(RECORD).encode()
    # One connection plays all others.
    other = StoreExchange(_Clients(server, 1, world_size))
    for rank in range(1, world_size):
        other._rank, other._round = rank, 0
        other.gather_bytes(data)
    begin = time.perf_counter()
    records = [json.loads(each) for each in own.gather_bytes(data)]
    own.broadcast({})
    taken = time.perf_counter() - begin
    assert len(records) == world_size
    return taken


# -- RNG states


def _rank_state(rank: int, *, alike: bool) -> dict[str, Any]:
    """Return what a Trainer saves of a rank, in the middle of an epoch."""
    if not alike:
        torch.manual_seed(rank)
        random.seed(rank)
    return {
        "random": {**rng_state(), "device": ["cuda", torch.full((16,), rank % 200).byte()]},
        "loader": {"shard": rank, "first": rank, "start": rng_state()},
        "validation": [],
    }


def _saved_states(world_size: int, *, alike: bool) -> tuple[dict[str, Any], float]:
    """Return what rank 0 saves of all ranks' states, and how long it takes."""
    first = _rank_state(0, alike=alike)
    sent: list[bytes] = []
    for rank in range(1, min(world_size, 64)):  # further ones as these
        played = _Sender(rank, world_size, answers=[first])
        gather_states(played, _rank_state(rank, alike=alike))
        sent.append(played.sent)
    longest = max(map(len, sent))
    messages = [_padded(sent[i % len(sent)], longest) for i in range(world_size - 1)]
    ranks = PlayedRanks(0, world_size, messages)
    begin = time.perf_counter()
    saved = gather_states(ranks, first)
    taken = time.perf_counter() - begin
    assert isinstance(saved, dict)
    return saved, taken


class _Sender(PlayedRanks):
    """A rank that remembers what it sends."""

    sent = b""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent = data
        return super().gather_bytes(data)


def seconds_of_states(world_size: int, *, alike: bool) -> float:
    """Return how long rank 0 takes for the RNG states of all ranks in a save."""
    return _saved_states(world_size, alike=alike)[1]


def megabytes_of_states(world_size: int, *, alike: bool) -> float:
    """Return how much of a checkpoint the RNG states of all ranks are."""
    size: int = _saved_states(world_size, alike=alike)[0]["changes"].nbytes
    return size / 1e6


def seconds_of_own_state(world_size: int) -> float:
    """Return how long another rank takes for its RNG states in a save, all of them its own."""
    ranks = PlayedRanks(1, world_size, answers=[_rank_state(0, alike=False)])
    state = _rank_state(1, alike=False)
    begin = time.perf_counter()
    gather_states(ranks, state)
    return time.perf_counter() - begin


def seconds_of_resume(world_size: int) -> float:
    """Return how long a rank takes to read its state in a resume, by which it goes on."""
    saved, _ = _saved_states(world_size, alike=False)
    begin = time.perf_counter()
    assert RankStates(saved)[world_size // 2]["loader"]
    return time.perf_counter() - begin


# -- the network


def seconds_of_network(save: int, world_size: int) -> float:
    """Return how long what rank 0 receives before writing takes on its way, computed."""
    flags = 5 * 8
    described = Held.of(state_of(0, world_size)["model"]).rows(2).nbytes
    return world_size * (flags if save else flags + described) / _BYTES_PER_SECOND


MEASURES: dict[str, Callable[[int], float]] = {
    "directory save, rank 0 plans (s)": partial(seconds_before_writing, 0, 0),
    "directory save, another rank plans (s)": partial(seconds_before_writing, 1, 0),
    "directory save, rank 0 plans again (s)": partial(seconds_before_writing, 0, 1),
    "directory save, another rank plans again (s)": partial(seconds_before_writing, 1, 1),
    "directory save, plans on the network, computed (s)": partial(seconds_of_network, 0),
    "directory save, rank 0 writes the layout (s)": seconds_of_layout,
    "directory save in the background, rank 0 hears of all (s)": seconds_of_exchange,
    "RNG states in a save, rank 0, devices' differ (s)": partial(seconds_of_states, alike=True),
    "RNG states in a save, rank 0, all differ (s)": partial(seconds_of_states, alike=False),
    "RNG states in a save, another rank, all differ (s)": seconds_of_own_state,
    "RNG states in the file, devices' differ (MB)": partial(megabytes_of_states, alike=True),
    "RNG states in the file, all differ (MB)": partial(megabytes_of_states, alike=False),
    "RNG states in a resume, each rank (s)": seconds_of_resume,
}
"""By what it is, a function of the number of ranks."""
