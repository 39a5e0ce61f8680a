"""The order of an epoch is torch's, costs next to nothing if it is long, and is a fair shuffle."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from stratagem.data import index_sequence
from stratagem.data.index_sequence import IndexSequence, Permutation
from stratagem.data.resume import make_resumable
from stratagem.data.resume.resumable import Resumable
from stratagem.data.sharding import ShardedSampler, set_epoch, shard_loader


class Samples:
    """A dataset that has no data."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def loader(samples: int, *, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    dataset: Any = Samples(samples)
    return DataLoader(dataset, batch_size=batch_size, collate_fn=lambda read: read, **options)


# ------------------------------------------------------------ sequences


@pytest.mark.parametrize(
    "make",
    [
        lambda items: items,
        lambda items: torch.tensor(items, dtype=torch.int32),
        lambda items: IndexSequence([None, *items])[1:],
        lambda items: range(3, 3 + 2 * len(items), 2),
    ],
    ids=["list", "tensor", "nested", "range"],
)
@pytest.mark.parametrize("length", [0, 1, 2, 5, 23])
def test_a_sequence_is_sliced_like_a_list(
    make: Callable[[list[int]], Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_sequence, "PIECE", 4)
    items = [7 * place % 23 for place in range(length)]
    made = make(items)
    if isinstance(made, range):
        items = list(made)
    order = IndexSequence(made)
    for part in (slice(None), slice(3, None), slice(1, 20, 3), slice(9, 2), slice(40, 50)):
        assert list(order[part]) == order[part].tolist() == items[part]
        assert list(order[part][1::2]) == items[part][1::2]
        assert len(order[part]) == len(items[part])
    assert [order[place] for place in range(length)] == items
    for count in (1, 2, 3, 7):
        parts = [list(order.shard(rank, count, even=False)) for rank in range(count)]
        assert parts == [items[rank::count] for rank in range(count)]
        # What is missing at the end is taken from the beginning, as often as it needs.
        padded = (items * (count + 1))[: math.ceil(length / count) * count]
        parts = [list(order.shard(rank, count, even=True)) for rank in range(count)]
        assert parts == [padded[rank::count] for rank in range(count)]


def test_an_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match="range object index out of range"):
        IndexSequence([1, 2])[2]


# ------------------------------------------------------------ permutations


def permutation(length: int, seed: int = 0) -> Permutation:
    return Permutation(length, torch.Generator().manual_seed(seed))


def test_every_number_comes_once() -> None:
    around_powers = {2**k + d for k in range(1, 15) for d in (-1, 0, 1)}
    for length in sorted({*range(1, 70), *around_powers, 999, 46_341, 65_537}):
        numbers = permutation(length, seed=length)[:]
        assert torch.equal(numbers.sort().values, torch.arange(length)), length


def test_slice_of_a_permutation_equals_slice_of_its_list() -> None:
    shuffled = permutation(1000)
    whole = shuffled[:].tolist()
    for part in (slice(0, 1), slice(17, 400), slice(3, None, 7), slice(990, 2000), slice(5, 2)):
        assert shuffled[part].tolist() == whole[part]
    assert len(shuffled) == 1000


def chi_square(counts: torch.Tensor) -> float:
    """Return how many standard deviations counts are from those of equal chances."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    statistic = ((counts - expected).square() / expected).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("length", [50, 64, 65])
def test_over_seeds_every_number_is_as_likely_at_every_place(length: int) -> None:
    drawn = torch.stack([permutation(length, seed)[:] for seed in range(4000)])
    for place in range(0, length, 7):
        assert abs(chi_square(drawn[:, place].bincount(minlength=length))) < 5, place
    # A pair of neighbours is as any two: which comes first, and how far apart they are.
    apart = (drawn[:, 1:] - drawn[:, :-1]).remainder(length).flatten()
    assert abs(chi_square(apart.bincount(minlength=length)[1:])) < 5


@pytest.mark.parametrize("length", [2**24 + 1, 10**9, 2**40 - 1])
def test_long_permutation_is_statistically_random(length: int) -> None:
    shuffled, other = permutation(length, 1), permutation(length, 2)
    for start in (0, length // 3, length - 2**16):
        numbers = shuffled[start : start + 2**16]
        assert int(numbers.min()) >= 0
        assert int(numbers.max()) < length
        assert len(set(numbers.tolist())) == 2**16
        # 16-ths of the range, and the last bits of the numbers, come equally often.
        assert abs(chi_square((numbers * 16 // length).bincount(minlength=16))) < 5
        assert abs(chi_square((numbers % 16).bincount(minlength=16))) < 5
        # Numbers say nothing of their neighbours, of the next batch, or of another seed's.
        for of_another in (numbers.roll(1), numbers.roll(32), other[start : start + 2**16]):
            both = torch.stack([numbers, of_another]).double()
            assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 2**8
            pairs = (numbers * 8 // length) * 8 + of_another * 8 // length
            assert abs(chi_square(pairs.bincount(minlength=64))) < 5
        assert int((numbers == other[start : start + 2**16]).sum()) < 5


def test_a_seed_gives_the_same_permutation_for_ever() -> None:
    # Checkpoints name the rule that shuffled: another order needs another name.
    assert permutation(10)[:].tolist() == [3, 7, 6, 1, 8, 5, 0, 2, 4, 9]
    assert permutation(10**9)[500:503].tolist() == [114579268, 72427713, 956540272]


# ------------------------------------------------------------ the order of a loader


def with_generator(samples: int) -> DataLoader[Any]:
    return loader(samples, shuffle=True, generator=torch.Generator().manual_seed(4))


TORCHS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sequential": loader,
    "shuffled": lambda n: loader(n, shuffle=True),
    "drop_last": lambda n: loader(n, shuffle=True, drop_last=True),
    "single samples": lambda n: loader(n, batch_size=None, shuffle=True),
    "generator": with_generator,
    "some": lambda n: loader(n, sampler=RandomSampler(Samples(n), num_samples=max(1, n // 2))),
    "more": lambda n: loader(n, sampler=RandomSampler(Samples(n), num_samples=2 * n + 1)),
    "with replacement": lambda n: loader(n, sampler=RandomSampler(Samples(n), replacement=True)),
    "subset": lambda n: loader(n, sampler=SubsetRandomSampler(range(n))),
    "weighted": lambda n: loader(n, sampler=WeightedRandomSampler([1.0] * n, n)),
    "distributed": lambda n: loader(
        n,
        sampler=DistributedSampler(Samples(n), 3, 1, seed=5),  # type: ignore[arg-type]
    ),
    "distributed, whole batches": lambda n: loader(
        n,
        sampler=DistributedSampler(Samples(n), 3, 1, drop_last=True),  # type: ignore[arg-type]
    ),
    "distributed, in order": lambda n: loader(
        n,
        sampler=DistributedSampler(Samples(n), 3, 2, shuffle=False),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("samples", [1, 4, 30, 48])
@pytest.mark.parametrize("kind", TORCHS)
def test_the_order_is_torchs_own_in_each_epoch(
    kind: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_sequence, "PIECE", 7)

    def epochs(begin: Callable[[DataLoader[Any], int], Iterator[Any]]) -> list[Any]:
        torch.manual_seed(1)
        made = TORCHS[kind](samples)
        read = []
        for epoch in range(3):
            set_epoch(made, epoch)
            # As many as it has: a front end does not ask for one more.
            read.append((list(islice(begin(made, epoch), len(made))), torch.rand(()).item()))
        return read

    reader: list[Resumable] = []

    def resumable(made: DataLoader[Any], epoch: int) -> Iterator[Any]:
        reader[:] = reader or [make_resumable(made, "the loader")]
        return reader[0].begin(epoch, 0)[0]

    ours = epochs(resumable)
    assert ours == epochs(lambda made, epoch: iter(made))


@pytest.mark.parametrize("done", [0, 1, 5, 12])
@pytest.mark.parametrize("kind", TORCHS)
def test_skipped_batches_do_not_change_the_rest(kind: str, done: int) -> None:
    def batches(done: int) -> list[Any]:
        torch.manual_seed(1)
        return list(make_resumable(TORCHS[kind](48), "the loader").begin(0, done)[0])

    assert batches(done) == batches(0)[done:]


def test_torchs_samplers_are_sharded_without_a_list() -> None:
    for sampler in (
        RandomSampler(Samples(50), replacement=True, num_samples=1000),
        WeightedRandomSampler([1.0] * 50, 1000),
    ):
        parts = [ShardedSampler(sampler, rank, 2, even=True, seed=3) for rank in range(2)]
        turns = list(chain.from_iterable(zip(*parts, strict=True)))
        assert turns == list(parts[0].order())
        assert turns != sorted(turns)
        assert set(turns) == set(range(50))


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffle 40 samples as a thousand million."""
    monkeypatch.setattr(index_sequence, "LARGEST_OF_TORCH", 39)


@pytest.mark.usefixtures("few_are_many")
def test_a_long_order_is_alike_at_any_number_of_ranks_and_another_in_each_epoch() -> None:
    orders = []
    for epoch in range(2):
        of_worlds = []
        for world in (2, 4):
            loaders = [
                shard_loader(loader(40, shuffle=True), r, world, even=True) for r in range(world)
            ]
            for one in loaders:
                set_epoch(one, epoch)
            of_ranks = [list(chain.from_iterable(one)) for one in loaders]
            of_worlds.append([sample for turn in zip(*of_ranks, strict=True) for sample in turn])
        assert of_worlds[0] == of_worlds[1]
        assert sorted(of_worlds[0]) == list(range(40))
        orders.append(of_worlds[0])
    assert orders[0] != orders[1]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("kind", ["shuffled", "generator", "distributed"])
def test_a_long_order_follows_from_torchs_seed_and_goes_on_in_its_middle(kind: str) -> None:
    def run(seed: int, state: Any = None, done: int = 0) -> tuple[list[Any], Any]:
        torch.manual_seed(seed)
        reader = make_resumable(TORCHS[kind](40), "the loader")
        if state is not None:
            assert reader.resume([state], done) == done
        read = []
        for epoch in range(2):
            batches = reader.begin(epoch, done if epoch == 0 else 0)[0]
            read.append(list(islice(batches, 2)))
            state = state or reader.state()
            read[-1] += batches
        return read, state

    whole, state = run(1)
    assert run(1)[0] == whole
    assert whole[0] != whole[1] or kind == "distributed", "nobody has set its epoch"
    rest, _ = run(9, state, done=2)
    assert rest[0] == whole[0][2:]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("batch_size", [4, 5])
def test_a_long_order_that_torch_has_shuffled_goes_on_as_torchs(batch_size: int) -> None:
    """A checkpoint of version 0.1.0 does not say what has shuffled: it was torch."""
    torch.manual_seed(1)
    reader = make_resumable(loader(40, shuffle=True), "the loader")
    next(reader.begin(0, 0)[0])
    state = reader.state()
    assert state.pop("rule") == "feistel-1"
    del state["length"]
    torch.manual_seed(1)
    raw = loader(40, shuffle=True)
    order = list(chain.from_iterable(raw))
    state["first"] = None

    resumed = make_resumable(loader(40, shuffle=True, batch_size=batch_size), "the loader")
    done = resumed.resume([state], 5)
    rest = list(chain.from_iterable(resumed.begin(0, done)[0]))
    assert rest == order[20:]
    # The rest of the epoch stays so, the next one is drawn as any other.
    assert resumed.state()["rule"] == "torch"
    next(resumed.begin(1, 0)[0])
    assert resumed.state()["rule"] == "feistel-1"


def test_unknown_shuffle_rule_of_a_checkpoint_warns() -> None:
    reader = make_resumable(loader(40, shuffle=True), "the loader")
    next(reader.begin(0, 0)[0])
    state = reader.state() | {"rule": "feistel-9"}
    resumed = make_resumable(loader(40, shuffle=True), "the loader")
    with pytest.warns(UserWarning, match=r"'feistel-9' when .* knows 'torch', 'feistel-1': some"):
        resumed.resume([state], 1)
    assert len(list(resumed.begin(0, 1)[0])) == 9


MANY = 10**9


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_thousand_million_samples_begin_and_resume_without_a_list_of_them(shuffle: bool) -> None:
    """A list of them is 44 GB."""

    def readers(world: int, batch_size: int) -> list[Resumable]:
        made = loader(MANY, shuffle=shuffle, batch_size=batch_size)
        return [
            make_resumable(shard_loader(made, r, world, even=True), "the loader", r, (r, world))
            for r in range(world)
        ]

    def turns(batches: list[Iterator[Any]]) -> list[int]:
        return [sample for turn in zip(*map(next, batches), strict=True) for sample in turn]

    tracemalloc.start()
    alone = readers(1, 32)
    first = turns([alone[0].begin(0, 0)[0]])
    assert shuffle or first == list(range(32))
    passed_over = 10_000_000
    of_two = readers(2, 32)
    later = turns([one.begin(0, passed_over)[0] for one in of_two])
    assert shuffle or later == list(range(64 * passed_over, 64 * passed_over + 64))
    assert len(set(later)) == 64
    states = [one.state() for one in of_two]
    # By another number of ranks, and with another batch size: after the same samples.
    of_four = readers(4, 4)
    done = [one.resume(states, passed_over) for one in of_four]
    assert done == [64 * passed_over // 16] * 4
    again = [one.begin(0, done[0])[0] for one in of_four]
    assert [turns(again) for _ in range(4)] == [later[n : n + 16] for n in range(0, 64, 16)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_a_loader_for_evaluation_is_sharded_without_a_list() -> None:
    part = ShardedSampler(SequentialSampler(Samples(MANY)), 1, 3, even=False, seed=0)
    assert list(islice(part, 2)) == [1, 4]
    assert len(part.part()) == len(part) == MANY // 3
