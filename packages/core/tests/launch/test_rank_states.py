"""RankStates: what every rank saves for itself, as rank 0 writes it and others read it."""

from __future__ import annotations

import copy
import io
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stratagem.errors import CheckpointCorruptError
from stratagem.rng import rng_state, set_rng_state
from stratagem.state import safe_data
from stratagem.state.rank_states import RankStates, gather_states
from stratagem.strategies import Ranks

State = dict[str, Any]


class Told(Ranks):
    """A rank that is told rank 0's state, and remembers what it sends."""

    def __init__(self, first: State, rank: int, world_size: int, sent: list[bytes]) -> None:
        super().__init__(global_rank=rank, world_size=world_size)
        self.first = first
        self.sent = sent

    def broadcast(self, data: Any, src: int = 0) -> Any:
        return self.first

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent[self.global_rank] = data
        return list(self.sent) if self.is_global_zero else []


def saved(states: list[State]) -> tuple[dict[str, Any], list[bytes]]:
    """Return what rank 0 saves of the ranks' states, and what each rank has sent."""
    sent = [b""] * len(states)
    for rank in reversed(range(len(states))):
        ranks = Told(states[0], rank, len(states), sent)
        gathered = gather_states(ranks, states[rank])
        assert bool(gathered) is (rank == 0)
    assert isinstance(gathered, dict)
    return gathered, sent


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def state_of(rank: int) -> State:
    """Return a state of which the RNGs of the host are alike on every rank."""
    torch.manual_seed(3)
    random.seed(3)
    return {
        "random": {**rng_state(), "device": ["cuda", torch.full((16,), rank, dtype=torch.uint8)]},
        "loader": {"shard": rank, "shards": 64, "first": 1000 + rank, "start": rng_state()},
        "validation": [[False, torch.get_rng_state()]],
    }


def test_each_state_comes_back_and_one_that_is_mostly_rank_zeros_is_small() -> None:
    states = [state_of(rank) for rank in range(64)]
    states[5]["loader"]["deal"] = {"seed": 7}  # a key of its own
    states[6]["random"]["torch"] = torch.zeros(5056, dtype=torch.uint8)
    states[7] = {"something": "else"}
    checkpoint, sent = saved(states)
    read = RankStates(checkpoint)
    assert len(read) == 64
    assert all(same(read[rank], state) for rank, state in enumerate(states))
    assert [state["shard"] for state in read.of("loader")[2:4]] == [2, 3]
    assert len(safe_data.encode(states[1])) > 15_000
    assert max(map(len, sent[8:])) < 2500
    with pytest.raises(IndexError, match="there are the states of 64 ranks, not of rank 64"):
        read[64]


def test_a_rank_decodes_its_own_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = saved([state_of(rank) for rank in range(8)])
    decoded: list[torch.Tensor] = []
    decode = safe_data.decode

    def counted(data: torch.Tensor, name: str) -> Any:
        decoded.append(data)
        return decode(data, name)

    monkeypatch.setattr(safe_data, "decode", counted)
    assert RankStates(checkpoint)[3]["loader"]["first"] == 1003
    assert len(decoded) == 1


def test_states_that_were_saved_as_a_list_are_read() -> None:
    states = [{"random": 1}, {"random": 2}]
    assert list(RankStates(states)) == states
    assert gather_states(Ranks(), states[0]) == states[:1]


def test_a_state_that_is_no_safe_data_is_refused_before_a_rank_waits() -> None:
    ranks = Told({}, 1, 2, [])
    with pytest.raises(TypeError, match=r"\['loader'\] is of type builtins.object"):
        gather_states(ranks, {"loader": object()})


def deflated(encoded: bytes) -> bytes:
    source, target = zipfile.ZipFile(io.BytesIO(encoded)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry))
    return target.getvalue()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda data: data[:-30], "does not end as an archive"),
        (lambda data: deflated(data), "is compressed"),
        (lambda data: encoded([(("a",), torch.zeros(1).expand(1 << 30))]), "of which only 4"),
        (lambda data: encoded([(("nowhere", "b"), 1)]), "is damaged: KeyError"),
        (lambda data: encoded(3), "is damaged: TypeError"),
    ],
)
def test_a_state_that_was_damaged_or_would_do_harm_is_refused(
    harm: Callable[[bytes], bytes], said: str
) -> None:
    checkpoint, sent = saved([{"a": 1}, {"a": torch.zeros(1000)}])
    sent[1] = harm(sent[1])
    checkpoint["changes"] = torch.frombuffer(bytearray().join(sent), dtype=torch.uint8)
    checkpoint["ends"] = torch.tensor([len(data) for data in sent]).cumsum(0)
    with pytest.raises(CheckpointCorruptError, match=rf"the state of rank 1.*{said}"):
        RankStates(checkpoint)[1]


def encoded(data: Any) -> bytes:
    return safe_data.bytes_of(safe_data.encode(data))


def test_the_rng_state_of_python_is_a_small_tensor_and_lists_are_read_too() -> None:
    state = rng_state()
    assert len(encoded(state)) < 12_500
    version, words, gauss = random.getstate()
    first = [random.random() for _ in range(3)]
    set_rng_state(state)
    assert [random.random() for _ in range(3)] == first
    set_rng_state({**copy.copy(state), "python": [version, list(words), gauss]})
    assert [random.random() for _ in range(3)] == first


def test_numpys_rng_state_comes_back_whole() -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(11)
    state = safe_data.decode(safe_data.encode(rng_state()))
    first = numpy.random.rand(700).tolist()
    set_rng_state(state)
    assert numpy.random.rand(700).tolist() == first
    kind, keys, *rest = state["numpy"]
    set_rng_state({**state, "numpy": [kind, keys.to(torch.int64) & 0xFFFFFFFF, *rest]})
    assert numpy.random.rand(700).tolist() == first
