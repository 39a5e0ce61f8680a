"""A directory save among many ranks: who plans what, what is sent, and what is in the layout."""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stratagem.checkpoint import DirectoryCheckpointIO, Shards
from stratagem.errors import CheckpointContentError, CheckpointSaveError
from stratagem.strategies import Ranks
from stratagem_torch.checkpoint.sharded import save_plan
from stratagem_torch.checkpoint.sharded.exchange import StoreExchange
from stratagem_torch.checkpoint.sharded.layout import encode_layout
from stratagem_torch.checkpoint.sharded.save_plan import GlobalPlan, Held
from stratagem_torch.checkpoint.sharded.shard_writer import file_of

Checkpoint = dict[str, Any]


class Meeting:
    """Where the threads that stand for ranks meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.data: list[Any] = [None] * world_size
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


class CountedStore:
    """A client of the store, which counts its requests and remembers its largest value."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = self.largest = 0

    def set_timeout(self, timeout: Any) -> None:
        self.store.set_timeout(timeout)

    def set(self, key: str, value: bytes) -> None:
        self.requests += 1
        self.largest = max(self.largest, len(value))
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        value: bytes = self.store.get(key)
        return value

    def delete_key(self, key: str) -> None:
        self.requests += 1
        self.store.delete_key(key)


class ThreadRanks(Ranks):
    """One of several ranks that are threads of this process; counts the bytes that it sends."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(global_rank=rank, world_size=len(meeting.data))
        self.meeting = meeting
        self.sent = 0
        self.stores: list[CountedStore] = []

    def _exchange(self, data: Any) -> list[Any]:
        self.meeting.data[self.global_rank] = data
        self.meeting.barrier.wait()
        everything = list(self.meeting.data)
        self.meeting.barrier.wait()
        return everything

    def all_reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        assert op == "max"
        self.sent += tensor.nbytes
        return torch.stack(self._exchange(tensor)).amax(0)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        return self._exchange(data)[src]

    def gather_objects(self, data: Any) -> list[Any]:
        raise AssertionError("every rank would receive what every rank has")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent += len(data)
        return self._exchange(data) if self.is_global_zero else self._exchange(data)[:0]

    def scatter_bytes(self, parts: Any) -> bytes:
        part: bytes = self._exchange(parts)[0][self.global_rank]
        return part

    def store(self) -> Any:
        self.stores.append(
            CountedStore(self.meeting.server.clone())  # type: ignore[attr-defined]
        )
        return self.stores[-1]


class Group:
    """Several ranks that save to directories together."""

    def __init__(self, world_size: int) -> None:
        meeting = Meeting(world_size)
        self.ranks = [ThreadRanks(meeting, rank) for rank in range(world_size)]
        self.ios = [DirectoryCheckpointIO() for _ in self.ranks]
        for io_of_rank, ranks in zip(self.ios, self.ranks, strict=True):
            io_of_rank.setup(ranks, "ddp")

    def do(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function with each rank, at once; return what it returns, or its errors."""

        def call(rank: int) -> Any:
            try:
                return function(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [*pool.map(call, range(len(self.ranks)))]

    def save(self, path: Path, of_rank: Callable[[int], Checkpoint]) -> list[Any]:
        return self.do(lambda rank: self.ios[rank].save_checkpoint(of_rank(rank), path))

    def sent(self, function: Callable[[], Any]) -> list[int]:
        """Return how many bytes each rank sends while a function runs."""
        before = [ranks.sent for ranks in self.ranks]
        function()
        return [ranks.sent - was for ranks, was in zip(self.ranks, before, strict=True)]


def rows_of(rank: int, value: float, tensors: int = 100, world_size: int = 4) -> Checkpoint:
    """Return a rank's rows of some tensors, and a whole one."""
    chunk = torch.full((2, 3), value + rank)
    shape = (2 * world_size, 3)
    weights: Checkpoint = {
        f"layer{i}.weight": Shards(shape, torch.float32, [((2 * rank, 0), chunk)])
        for i in range(tensors)
    }
    return {"model": {**weights, "steps": torch.tensor(value)}}


# ---------------------------------------------------------------- what is sent


def test_second_save_sends_little_and_writes_the_new_values(tmp_path: Path) -> None:
    group = Group(4)
    first = group.sent(lambda: group.save(tmp_path / "a", lambda rank: rows_of(rank, 1.0)))
    again = group.sent(lambda: group.save(tmp_path / "b", lambda rank: rows_of(rank, 5.0)))
    assert min(first) > 3000
    assert max(again) < 1000
    for name, value in (("a", 1.0), ("b", 5.0)):
        model = DirectoryCheckpointIO().load_checkpoint(tmp_path / name)["model"]
        assert model["layer7.weight"][:, 0].tolist() == [
            value + i for i in (0, 0, 1, 1, 2, 2, 3, 3)
        ]
        assert model["steps"] == value


def test_a_rank_that_holds_something_else_is_planned_for_anew(tmp_path: Path) -> None:
    group = Group(4)
    group.save(tmp_path / "a", lambda rank: rows_of(rank, 1.0))

    def swapped(rank: int) -> Checkpoint:
        held = rows_of({1: 2, 2: 1}.get(rank, rank), 1.0)
        if rank == 3:
            held["model"]["only here"] = Shards((1,), torch.int64, [((0,), torch.tensor([7]))])
        return held

    assert group.save(tmp_path / "b", swapped) == [None] * 4
    model = DirectoryCheckpointIO().load_checkpoint(tmp_path / "b")["model"]
    assert model["layer7.weight"][:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert DirectoryCheckpointIO().load_checkpoint(tmp_path / "b")["model.only here"].tolist() == [
        7
    ]


def test_a_rank_that_fails_is_named_by_every_rank_and_the_next_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(3)

    def held(rank: int) -> Checkpoint:
        return rows_of(rank, 1.0, world_size=3)

    def unsavable(rank: int) -> Checkpoint:
        return {**held(rank), **({"x": object()} if rank == 2 else {})}

    group.save(tmp_path / "a", held)
    errors = group.save(tmp_path / "b", unsavable)
    assert {type(error) for error in errors} == {CheckpointContentError}
    assert len({str(error) for error in errors}) == 1
    assert "rank 2: checkpoint['x'] is of type builtins.object" in str(errors[0])
    # While writing.
    from stratagem.storage import local

    write = local.StreamedFile.write

    def full(self: Any, data: Any) -> int:
        if threading.current_thread().name.endswith("full"):
            raise OSError(28, "No space left on device")
        return write(self, data)

    def save_as_full(rank: int) -> None:
        threading.current_thread().name = "full" if rank == 1 else "other"
        group.ios[rank].save_checkpoint(held(rank), tmp_path / "b")

    monkeypatch.setattr(local.StreamedFile, "write", full)
    errors = group.do(save_as_full)
    assert len({str(error) for error in errors}) == 1
    assert "rank 1: OSError: [Errno 28] No space left on device; nothing" in str(errors[0])
    assert [error.errno for error in errors] == [28] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    monkeypatch.undo()
    assert group.save(tmp_path / "b", held) == [None] * 3
    DirectoryCheckpointIO().verify_checkpoint(tmp_path / "b")


def test_a_chunk_of_other_dims_is_refused_on_every_rank_before_one_waits(tmp_path: Path) -> None:
    group = Group(2)

    def held(rank: int) -> Checkpoint:
        chunk = ((2 * rank, 0), torch.zeros(2, 3)) if rank == 0 else ((2,), torch.zeros(6))
        return {"model": {"w": Shards((4, 3), torch.float32, [chunk])}}

    errors = group.save(tmp_path / "a", held)
    assert {type(error) for error in errors} == {CheckpointContentError}
    for error in errors:
        assert "rank 1: 'model.w' has the shape (4, 3), but one of its chunks has" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_an_authors_ranks_need_no_more_than_gather_plain_and_broadcast() -> None:
    class Own(Ranks):
        def gather_objects(self, data: Any) -> list[Any]:
            return [b"of rank 0", b"of rank 1"]

        def broadcast(self, data: Any, src: int = 0) -> Any:
            return [b"for rank 0", b"for rank 1"]

    first, second = Own(world_size=2), Own(global_rank=1, world_size=2)
    assert first.gather_bytes(b"of rank 0") == [b"of rank 0", b"of rank 1"]
    assert second.gather_bytes(b"of rank 1") == []
    assert first.scatter_bytes([b"for rank 0", b"for rank 1"]) == b"for rank 0"
    assert second.scatter_bytes([]) == b"for rank 1"


# ---------------------------------------------------------------- in the background


def in_background(group: Group, path: Path, of_rank: Callable[[int], Checkpoint]) -> list[Any]:
    def save(rank: int) -> None:
        group.ios[rank].prepare_save(of_rank(rank), path)()

    return group.do(save)


def test_a_rank_asks_the_store_as_often_among_twelve_as_among_three(tmp_path: Path) -> None:
    requests = {}
    for world_size in (3, 12):
        group = Group(world_size)
        for name in ("first", "second"):

            def held(rank: int, world_size: int = world_size) -> Checkpoint:
                return rows_of(rank, 1.0, 2, world_size)

            assert (
                in_background(group, tmp_path / f"{name}{world_size}", held) == [None] * world_size
            )
        requests[world_size] = {ranks.stores[0].requests for ranks in group.ranks[1:]}
        # Rank 0 leaves nothing but its last answer in the store.
        assert group.ranks[0].meeting.server.num_keys() <= 2
    assert requests[3] == requests[12] == {4}


def test_gather_bytes_splits_messages_over_the_store_limit() -> None:
    group = Group(2)
    # Where each begins, and how long each is: what a rank says of the chunks that it has written.
    said = json.dumps([[1 << 40] * 60_000, [1 << 40] * 60_000]).encode() * 5
    assert len(said) > 8 << 20

    def exchange(rank: int) -> list[bytes]:
        return StoreExchange(group.ranks[rank]).gather_bytes(said)

    assert group.do(exchange) == [[said, said], []]
    assert group.ranks[1].stores[0].largest < 8 << 20


def test_another_exchange_in_the_same_store_hears_nothing_of_the_one_before() -> None:
    group = Group(2)
    for said in (b"first", b"second"):

        def round_(rank: int, said: bytes = said) -> Any:
            exchange = StoreExchange(group.ranks[rank])
            heard = exchange.gather_bytes(said)
            return exchange.broadcast([part.decode() for part in heard])

        assert group.do(round_) == [[said.decode()] * 2] * 2


def test_stopped_exchange_raises_and_names_the_lost_rank() -> None:
    group = Group(3)

    def wait(rank: int) -> None:
        exchange = StoreExchange(group.ranks[rank])
        if rank == 2:
            return
        threading.Timer(0.1, exchange.stop).start()
        exchange.gather_bytes(b"")
        exchange.broadcast("")

    errors = group.do(wait)
    assert isinstance(errors[0], CheckpointSaveError)
    assert "rank 2 has not written its share of a checkpoint, so nothing was saved" in str(
        errors[0]
    )
    assert isinstance(errors[1], CheckpointSaveError)
    assert "rank 0 has not said that all ranks have written their shares" in str(errors[1])


# ---------------------------------------------------------------- the plan


def cut(shape: tuple[int, ...], rng: random.Random) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield chunks that make up a tensor: cut again and again at random places."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(6)):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape)) if shape else 0
        at = rng.randrange(1, sizes[dim]) if shape and sizes[dim] > 1 else 0
        if not at:
            boxes.append((offsets, sizes))
            continue
        upper = [*offsets]
        upper[dim] += at
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        boxes.append((tuple(upper), (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    for offsets, sizes in boxes:
        yield offsets, torch.zeros(sizes)


def random_holdings(seed: int, world_size: int) -> list[dict[str, Tensor | Shards]]:
    """Return what some ranks hold: some chunks are on several ranks, some tensors are whole."""
    rng = random.Random(seed)
    held: list[dict[str, Tensor | Shards]] = [{} for _ in range(world_size)]
    for number in range(20):
        shape = tuple(rng.choices(range(1, 7), k=rng.randrange(4)))
        if rng.random() < 0.3:
            for of_rank in held:
                of_rank[f"t{number}"] = torch.zeros(shape)
            continue
        chunks: list[list[Any]] = [[] for _ in range(world_size)]
        for chunk in cut(shape, rng):
            for rank in rng.sample(range(world_size), rng.randrange(1, world_size + 1)):
                chunks[rank].append(chunk)
        for of_rank, own in zip(held, chunks, strict=True):
            of_rank[f"t{number}"] = Shards(shape, torch.float32, own)
    return held


def planned(held: list[dict[str, Tensor | Shards]]) -> GlobalPlan:
    described = [Held.of(of_rank) for of_rank in held]
    dims = max(each.dims for each in described)
    return GlobalPlan(described[0].tensors, [each.rows(dims) for each in described])


@pytest.mark.parametrize("seed", range(20))
def test_save_plan_and_layout_equal_dcp(seed: int) -> None:
    held = random_holdings(seed, 4)
    plan = planned(held)
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    local = []
    for of_rank in held:
        planner.set_up_planner(dict(of_rank))
        local.append(planner.create_local_plan())
    dcp_plans, expected = planner.create_global_plan(local)
    # A tensor of one chunk by each rank's own number and place.
    places, files = [], [file_of(rank) for rank in range(4)]
    for rank, (of_rank, mask) in enumerate(zip(held, plan.masks, strict=True)):
        chunks = [
            MetadataIndex(name, offsets)
            for name, one in of_rank.items()
            for offsets, _ in save_plan.chunks_of(one)
        ]
        written = [index for index, is_own in zip(chunks, mask.tolist(), strict=True) if is_own]
        assert set(written) == {item.index for item in dcp_plans[rank].items}
        starts = [1000 * number + (rank << 32) for number in range(len(written))]
        lengths = [50 + rank] * len(written)
        places.append(torch.tensor([starts, lengths], dtype=torch.int64))
        expected.storage_data = {
            **(expected.storage_data or {}),
            **{
                index: _StorageInfo(files[rank], start, 50 + rank)
                for index, start in zip(written, starts, strict=True)
            },
        }
    plan.places = [*places]
    paths = {name: ("model", name, 0) for name in held[0]}
    layout = b"".join(encode_layout(plan, files, plan.all_places(), paths))
    found = pickle.loads(layout)
    assert isinstance(found, Metadata)
    assert found.planner_data == paths
    assert found.storage_data == expected.storage_data
    assert found.version == "1.0.0"
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in expected.state_dict_metadata.items():
        own = found.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        assert isinstance(own, TensorStorageMetadata)
        # torch 2.15 notes strides too, and reads a layout without them, as older ones have left it.
        noted: dict[str, Any] = {"strides": None} if hasattr(entry.properties, "strides") else {}
        assert (own.size, own.properties) == (entry.size, replace(entry.properties, **noted))
        assert sorted((c.offsets, c.sizes) for c in own.chunks) == sorted(
            (c.offsets, c.sizes) for c in entry.chunks
        )


def test_offsets_beyond_four_thousand_million_are_kept() -> None:
    last = torch.zeros(1).expand(10, 1 << 32)
    held: dict[str, Tensor | Shards] = {
        "t": Shards((20, 1 << 32), torch.int8, [((0, 0), last), ((10, 0), last)])
    }
    plan = planned([held])
    plan.places = [torch.tensor([[0, 1 << 40], [10 << 32, 10 << 32]])]
    found = pickle.loads(b"".join(encode_layout(plan, ["f"], plan.all_places(), {})))
    [first, second] = found.state_dict_metadata["t"].chunks
    assert (first.offsets, first.sizes) == ((0, 0), (10, 1 << 32))
    assert (second.offsets, second.sizes) == ((10, 0), (10, 1 << 32))
    assert found.storage_data[MetadataIndex("t", (10, 0))] == _StorageInfo("f", 1 << 40, 10 << 32)


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "its chunks hold 9 of its 12 elements"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((1, 0), (1, 3))], "its chunks overlap"),
        # As many elements as there are, though one is there twice and another not at all.
        ([((0, 0), (2, 3)), ((2, 0), (2, 2)), ((1, 2), (2, 1))], "its chunks overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "one of its chunks lies outside of it"),
        ([((0, 0), (4, 3)), ((-1, 0), (1, 3))], "one of its chunks lies outside of it"),
    ],
)
def test_chunks_that_do_not_make_a_whole_are_refused_by_name(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], why: str
) -> None:
    good = Shards((4, 3), torch.float32, [((0, 0), torch.zeros(4, 3))])
    bad = Shards(
        (4, 3), torch.float32, [(offsets, torch.zeros(sizes)) for offsets, sizes in chunks]
    )
    with pytest.raises(ValueError, match=rf"^'bad' has the shape \(4, 3\), and {why}$"):
        planned([{"good": good, "bad": bad, "more": good}])


def test_the_chunks_of_a_thousand_ranks_are_planned_and_laid_out() -> None:
    tensors = [(f"t{i}", "float32", (4000, 3)) for i in range(100)]
    numbers = torch.arange(100)
    rows = []
    for rank in range(1000):
        row = torch.zeros(100, 5, dtype=torch.int64)
        row[:, 0], row[:, 1], row[:, 3], row[:, 4] = numbers, 4 * rank, 4, 3
        rows.append(row)
    plan = GlobalPlan(tensors, rows)
    assert len(plan.numbers) == 100_000
    assert plan.writers.bincount().tolist() == [100] * 1000
    plan.places = [torch.zeros(2, 100, dtype=torch.int64)] * 1000
    pieces = encode_layout(plan, [file_of(rank) for rank in range(1000)], plan.all_places(), {})
    assert sum(len(piece) for piece in pieces) < 200 * 100_000
