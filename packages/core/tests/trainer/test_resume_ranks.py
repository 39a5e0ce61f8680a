"""Another number of ranks goes on in the middle of an epoch: no sample is repeated or lost."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from stratagem.data.resume import make_resumable
from stratagem.data.resume.resumable import Resumable
from stratagem.data.sharding import set_epoch, shard_loader

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


class Ranks:
    """The loaders of so many ranks, as front ends make them."""

    def __init__(self, make: Callable[..., Any], count: int, seed: int = 0) -> None:
        self.readers = []
        for rank in range(count):
            torch.manual_seed(seed)
            loader = make() if make is not distributed else make(rank, count)
            sharded = shard_loader(loader, rank, count, even=True)
            self.readers.append(make_resumable(sharded, "the loader", rank, (rank, count)))
        self.batches = 0
        self.begun: list[Iterator[Any]] = []

    def begin(self, epoch: int) -> None:
        self.begun = []
        for reader in self.readers:
            set_epoch(reader.loader, epoch)
            self.begun.append(reader.begin(epoch, self.batches)[0])

    def read(self, steps: int) -> list[int]:
        """Return what all ranks read in so many steps, in the order in which it was sharded."""
        read: list[int] = []
        for _ in range(steps):
            of_ranks = [next(batches).tolist() for batches in self.begun]
            read += [sample for turn in zip(*of_ranks, strict=True) for sample in turn]
            self.batches += 1
        return read

    def end(self) -> list[int]:
        """Return all that is left of the epoch."""
        of_ranks = [[s for batch in batches for s in batch.tolist()] for batches in self.begun]
        lengths = {len(samples) for samples in of_ranks}
        assert len(lengths) == 1, "ranks must take as many steps"
        self.batches = 0
        return [sample for turn in zip(*of_ranks, strict=True) for sample in turn]

    def states(self) -> list[dict[str, Any]]:
        return [reader.state() for reader in self.readers]

    def resume(self, saved: Ranks) -> Ranks:
        for reader in self.readers:
            self.batches = reader.resume(saved.states(), saved.batches)
        return self


def shuffled(samples: int = 48, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(samples), batch_size=batch_size, shuffle=True, **options)  # type: ignore[arg-type]


def larger_batches() -> DataLoader[Any]:
    return shuffled(batch_size=4)


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(9))


def in_order(samples: int = 48, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(range(samples), batch_size=batch_size)  # type: ignore[arg-type]


def distributed(rank: int, count: int) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(range(48), count, rank, seed=3)  # type: ignore[arg-type]
    return DataLoader(range(48), batch_size=2, sampler=sampler)  # type: ignore[arg-type]


def weighted() -> DataLoader[Any]:
    return DataLoader(
        range(48),  # type: ignore[arg-type]
        batch_size=2,
        sampler=WeightedRandomSampler(list(range(1, 49)), 48, replacement=False),
    )


@pytest.mark.parametrize("make", [shuffled, with_generator, in_order, distributed, weighted])
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3), (3, 2, 1), (1, 3, 1, 2)])
def test_the_rest_of_the_epoch_is_dealt_in_the_same_order(
    make: Callable[..., Any], worlds: tuple[int, ...]
) -> None:
    whole = Ranks(make, worlds[0], seed=1)
    whole.begin(epoch=2)
    order = whole.end()
    assert sorted(order) == list(range(48))

    ranks = Ranks(make, worlds[0], seed=1)
    ranks.begin(epoch=2)
    read = ranks.read(steps=3)
    for world in worlds[1:]:
        # Another seed: the order is that of the run that saved.
        ranks = Ranks(make, world, seed=50).resume(ranks)
        ranks.begin(epoch=2)
        # A resume on as many ranks, of an epoch that was resharded, is a resume like any other.
        read += ranks.read(steps=1)
        ranks = Ranks(make, world, seed=60).resume(ranks)
        ranks.begin(epoch=2)
        read += ranks.read(steps=1)
    read += ranks.end()
    assert read == order

    ranks.begin(epoch=3)
    following = ranks.end()
    assert sorted(following) == list(range(48))
    assert following != order or make is in_order


def test_another_batch_size_goes_on_after_the_same_samples() -> None:
    whole = Ranks(shuffled, 2, seed=1)
    whole.begin(epoch=0)
    order = whole.end()
    ranks = Ranks(shuffled, 2, seed=1)
    ranks.begin(epoch=0)
    read = ranks.read(steps=3)
    ranks = Ranks(larger_batches, 2, seed=50).resume(ranks)
    assert ranks.batches == 1, "12 samples are one and a half steps of 8"
    ranks.begin(epoch=0)
    assert {reader.left for reader in ranks.readers} == {5}, "36 samples, in steps of 8"
    assert read + ranks.end() == order


def test_resumed_epoch_pads_to_a_multiple_of_the_ranks() -> None:
    ranks = Ranks(lambda: shuffled(50), 2, seed=1)
    ranks.begin(epoch=0)
    read = ranks.read(steps=4)
    ranks = Ranks(lambda: shuffled(50), 3, seed=1).resume(ranks)
    ranks.begin(epoch=0)
    counts = Counter(read + ranks.end())
    assert set(counts) == set(range(50))
    # 34 are left for 3 ranks, so that two are read again.
    assert sum(counts.values()) == 52


def test_drop_last_after_a_resume_drops_incomplete_batches() -> None:
    def make() -> DataLoader[Any]:
        return shuffled(48, 4, drop_last=True)

    ranks = Ranks(make, 2, seed=1)
    ranks.begin(epoch=0)
    read = ranks.read(steps=1)
    ranks = Ranks(make, 3, seed=1).resume(ranks)
    ranks.begin(epoch=0)
    read += ranks.end()
    # 40 are left, 14 for each of 3 ranks, of which 12 fill batches.
    assert len(read) == 8 + 36
    assert max(Counter(read).values()) == 1


def test_the_seed_of_the_run_that_saved_goes_on_in_later_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRATAGEM_SEED", "5")
    saved = Ranks(shuffled, 2)
    saved.begin(epoch=0)
    read = saved.read(steps=2)
    monkeypatch.setenv("STRATAGEM_SEED", "6")
    ranks = Ranks(shuffled, 2).resume(saved)
    for epoch in range(2):
        ranks.begin(epoch)
        saved.begin(epoch)
        if epoch == 0:
            assert sorted(read + ranks.end()) == list(range(48))
            saved.end()
        else:
            assert ranks.end() == saved.end()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


class Stateful(Stream):
    position = loaded = 0

    def __iter__(self) -> Iterator[int]:
        self.position, self.loaded = self.loaded, 0
        while self.position < 48:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


class Halves(DistributedSampler[int]):
    """A sampler that divides the data in a way of its own."""


class Own(BatchSampler):
    num_replicas = 2


CANNOT: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (
        lambda: [torch.tensor([number]) for number in range(6)],
        "which samples a rank reads is up to the loader",
    ),
    "iterable": (
        lambda: DataLoader(Stream(), batch_size=2),
        "which samples a rank reads is up to the loader",
    ),
    "own state": (
        lambda: DataLoader(Stateful(), batch_size=2),
        "which samples a rank reads is up to the loader",
    ),
    "own sampler": (
        lambda: DataLoader(range(48), batch_size=2, sampler=Halves(range(48), 2, 0)),  # type: ignore[arg-type]
        r"its sampler \(Halves\) divides the data",
    ),
    "own batches": (
        lambda: DataLoader(
            range(48),  # type: ignore[arg-type]
            batch_sampler=Own(SequentialSampler(range(48)), 2, False),
        ),
        r"its batch sampler \(Own\) makes the batches",
    ),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_where_samples_are_not_known_a_resume_with_other_ranks_says_why(kind: str) -> None:
    make, reason = CANNOT[kind]
    ranks = Ranks(make, 2)
    ranks.begin(epoch=0)
    ranks.read(steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks.states()
        with pytest.warns(UserWarning, match=f"read twice and others not at all, since {reason}"):
            Ranks(make, 1).resume(ranks)


class Endless(IterableDataset[int]):
    """Counts without an end, from its position on."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_stream_that_other_ranks_have_left_begins_at_the_beginning_and_says_so() -> None:
    def reader(rank: int, ranks: int) -> Resumable:
        return make_resumable(
            DataLoader(Endless(), batch_size=2), "the loader", rank, (rank, ranks)
        )

    states = []
    for rank in range(2):
        before = reader(rank, 2)
        batches, _ = before.begin(0, 0, 3)
        assert [next(batches).tolist() for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]
        states.append(before.state(within_epoch=False))
    again = reader(1, 2)
    assert again.resume(states, 0) == 0
    assert next(again.begin(1, 0, 3)[0]).tolist() == [7, 8]
    alone = reader(0, 1)
    with pytest.warns(
        UserWarning, match=r"positions of 2 reader\(s\) of the loader, and now .* 1: "
    ):
        assert alone.resume(states, 0) == 0
    assert next(alone.begin(1, 0, 3)[0]).tolist() == [1, 2]


class Dealt:
    """A loader of its own kind, whose state is a position in the data of all ranks."""

    batch_size = 1
    position, index, count = 0, 0, 1

    def read_part(self, index: int, count: int) -> Dealt:
        part = Dealt()
        part.index, part.count = index, count
        return part

    def __iter__(self) -> Iterator[Any]:
        while self.position + self.count <= 12:
            self.position += self.count
            yield torch.tensor([self.position - self.count + self.index])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_loader_that_deals_its_data_continues_on_any_number_of_ranks() -> None:
    first = Ranks(Dealt, 2)
    first.begin(epoch=0)
    assert first.read(steps=3) == [0, 1, 2, 3, 4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = Ranks(Dealt, 3).resume(first)
    later.begin(epoch=0)
    assert later.batches == 2
    assert later.read(steps=2) == [6, 7, 8, 9, 10, 11]


def test_a_stream_that_takes_over_its_position_late_is_resumed_before_the_last_batch() -> None:
    class Late(Endless):
        loaded = 0

        def __iter__(self) -> Iterator[int]:
            self.position, self.loaded = self.loaded, 0
            yield from super().__iter__()

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.loaded = state["position"]

    first, again = (make_resumable(DataLoader(Late(), batch_size=2), "the loader") for _ in "12")
    batches, _ = first.begin(0, 0, 3)
    next(batches), next(batches)
    assert again.resume([first.state()], 2) == 2
    assert next(again.begin(0, 2, 3)[0]).tolist() == [5, 6]
    assert again.state()["before_last"] == {"position": 4}


def test_loaders_that_the_user_divides_are_not_dealt_anew() -> None:
    saved = [make_resumable(in_order(), "the loader", rank, (rank, 2)) for rank in range(2)]
    for reader in saved:
        next(reader.begin(0, 0)[0])
    states = [reader.state() for reader in saved]
    alone = make_resumable(in_order(), "the loader")
    with pytest.warns(UserWarning, match="since the order in which they were read is not known"):
        alone.resume(states, 1)
    divided = make_resumable(in_order(), "the loader", 0, (0, 2))
    with pytest.warns(UserWarning, match="since its data were divided by whoever made it"):
        divided.resume([alone.state()], 1)


def test_a_position_that_was_saved_before_the_first_batch_is_not_resharded() -> None:
    saved = Ranks(shuffled, 2)
    states = [reader.state() for reader in saved.readers]  # as after a load, before the next loop
    (alone,) = Ranks(shuffled, 1).readers
    with pytest.warns(UserWarning, match="since the order in which they were read is not known"):
        assert alone.resume(states, 3) == 6


def test_a_sampler_of_another_kind_is_not_dealt_to() -> None:
    saved = Ranks(distributed, 2)
    saved.begin(0)
    saved.read(1)
    with pytest.warns(UserWarning, match="since they were divided by another sampler"):
        Ranks(shuffled, 3).resume(saved)


def test_an_order_that_is_not_drawn_again_is_found_at_the_resume() -> None:
    def make(order: list[int]) -> DataLoader[Any]:
        return DataLoader(range(48), batch_size=2, sampler=order)  # type: ignore[arg-type]

    saved = Ranks(lambda: make(list(range(48))), 1)
    saved.begin(0)
    saved.read(2)
    resumed = Ranks(lambda: make(list(range(47, -1, -1))), 1).resume(saved)
    with pytest.warns(UserWarning, match=r"do not come in the order .* sampler \(list\)"):
        resumed.begin(0)


def in_batches(batch_size: int, sampler: Any = RandomSampler) -> DataLoader[Any]:
    samples: Any = range(24)
    return DataLoader(samples, batch_sampler=BatchSampler(sampler(samples), batch_size, False))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 4), (2, 6), (4, 2), (3, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler, SubsetRandomSampler])
def test_a_sampler_in_a_batch_sampler_repeats_no_sample_with_another_batch_size(
    before: int, after: int, ranks: int, sampler: Any
) -> None:
    saved = Ranks(lambda: in_batches(before, sampler), ranks, seed=1)
    saved.begin(0)
    read = saved.read(2)
    assert (read == list(range(len(read)))) is (sampler is SequentialSampler)
    resumed = Ranks(lambda: in_batches(after, sampler), ranks, seed=50).resume(saved)
    resumed.begin(0)
    rest = resumed.end()
    assert set(read + rest) == set(range(24))
    # Ranks take equal steps, so a rest that does not divide repeats one sample for each at most.
    assert len(read + rest) - 24 < ranks


def seeded(samples: Any) -> RandomSampler:
    return RandomSampler(samples, generator=torch.Generator().manual_seed(5))


ORDERS: dict[str, Callable[[Any], Any]] = {
    "shuffled": RandomSampler,
    "in order": SequentialSampler,
    "weighted": lambda samples: WeightedRandomSampler([1.0] * 24, 24, replacement=False),
    "subset": SubsetRandomSampler,
    "with a generator": seeded,
    "backwards": lambda samples: list(reversed(samples)),
}


@pytest.mark.parametrize("in_batch_sampler", [False, True])
@pytest.mark.parametrize(("batch_size", "ranks"), [(2, 1), (3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("before", ORDERS)
def test_another_sampler_is_noticed_whatever_the_batch_size_and_ranks(
    before: str, batch_size: int, ranks: int, in_batch_sampler: bool
) -> None:
    def loader(order: str, size: int) -> DataLoader[Any]:
        if in_batch_sampler:
            return in_batches(size, ORDERS[order])
        samples: Any = range(24)
        return DataLoader(samples, batch_size=size, sampler=ORDERS[order](samples))

    for after in ORDERS:
        saved = Ranks(lambda: loader(before, 2), 1, seed=1)
        saved.begin(0)
        saved.read(2)
        resumed = Ranks(lambda: loader(after, batch_size), ranks, seed=50)  # noqa: B023
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed.resume(saved)
            resumed.begin(0)
            resumed.end()
        expected = 0 if after == before else 1
        assert len(said) == expected, f"{before}, then {after}: {[str(one) for one in said]}"
        assert all("may be read twice" in str(one.message) for one in said)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_dataset_of_another_type_is_noticed(batch_size: int) -> None:
    saved = Ranks(lambda: in_order(24), 1)
    saved.begin(0)
    saved.read(2)
    other: Any = list(range(24))
    resumed = Ranks(lambda: DataLoader(other, batch_size=batch_size), 1)
    with pytest.warns(UserWarning, match="dataset of the loader was a 'range', and now it is a 'l"):
        resumed.resume(saved)


@pytest.mark.parametrize("make", [shuffled, in_order])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("samples", [8, 24, 40, 1000])
def test_resume_with_another_dataset_length_warns(
    make: Callable[..., Any], ranks: int, batch_size: int, samples: int
) -> None:
    saved = Ranks(lambda: make(32), 1, seed=1)
    saved.begin(0)
    saved.read(5)
    resumed = Ranks(lambda: make(samples, batch_size), ranks)
    follows = "some samples of this epoch may be read twice and others not at all"
    if samples == 8:
        follows = "fewer than the 10 that were read: nothing of this epoch is left"
    message = (
        "the checkpoint was saved in the middle of an epoch, with 32 samples in the dataset of the "
        f"loader, and now there are {samples}: {follows}. Resume with the dataset that it was "
        "saved with, or from a checkpoint of the end of an epoch"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        resumed.resume(saved)
    resumed.begin(0)
    assert len(resumed.end()) == max(0, -(-(samples - 10) // ranks) * ranks)


def test_a_checkpoint_that_does_not_say_how_many_samples_there_were_is_resumed() -> None:
    saved = Ranks(shuffled, 1, seed=1)
    saved.begin(0)
    read = saved.read(2)
    (state,) = saved.states()
    del state["length"]  # as version 0.1.0 wrote it
    resumed = Ranks(larger_batches, 1)
    resumed.batches = resumed.readers[0].resume([state], 2)
    resumed.begin(0)
    assert sorted(read + resumed.end()) == list(range(48))


SCRIPT = (SCRIPTS / "resume_ranks.py").read_text()


@pytest.mark.slow
def test_every_sample_of_the_epoch_is_trained_on_once_by_another_number_of_ranks(
    run_script: RunScript, tmp_path: Path
) -> None:
    def run(*fits: dict[str, Any]) -> None:
        run_script(SCRIPT, *(json.dumps(fit) for fit in fits))

    def read(folder: str) -> Counter[tuple[int, int]]:
        files = (tmp_path / folder).glob("rank*.json")
        return Counter((e, sample) for file in files for e, sample in json.loads(file.read_text()))

    # In the second epoch of 24 steps of one process, or 12 of two.
    run({"folder": "one", "devices": 1, "seed": 1, "max_steps": 29})
    run(
        {"folder": "two", "devices": 2, "seed": 1, "max_steps": 15},
        {"folder": "one-two", "devices": 2, "seed": 5, "ckpt_path": "one/step=29.ckpt"},
    )
    run({"folder": "two-three", "devices": 3, "seed": 5, "ckpt_path": "two/step=15.ckpt"})
    run({"folder": "two-one", "devices": 1, "seed": 5, "ckpt_path": "two/step=15.ckpt"})
    once = Counter({(epoch, sample): 1 for epoch in range(2) for sample in range(48)})
    for before, after in (("one", "one-two"), ("two", "two-three"), ("two", "two-one")):
        assert read(before) + read(after) == once, f"{before} and then {after}"


def test_a_distributed_sampler_in_a_batch_sampler_divides_the_data_itself() -> None:
    samples: Any = range(24)
    batches = BatchSampler(DistributedSampler(samples, 2, 0), 2, False)
    loader = DataLoader(samples, batch_sampler=batches)
    assert shard_loader(loader, 0, 2, even=True) is loader


class Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch

    def __len__(self) -> int:
        return 2 * super().__len__()


class Filtering(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if int(batch.sum()) % 3)


class Converting(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 10 for batch in super().__iter__())


@pytest.mark.parametrize("kind", [Repeating, Filtering, Converting])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [1, 2])
def test_loaders_with_an_own_iter_resume_exactly(kind: Any, workers: int, count: int) -> None:
    def make() -> Any:
        return kind(range(48), batch_size=2, shuffle=True, num_workers=workers)

    whole = Ranks(make, count, seed=1)
    whole.begin(0)
    expected = whole.read(7)
    ranks = Ranks(make, count, seed=1)
    ranks.begin(0)
    read = ranks.read(4)
    resumed = Ranks(make, count, seed=50).resume(ranks)
    resumed.begin(0)
    assert read + resumed.read(3) == expected


def test_another_batch_size_of_a_loader_with_an_own_iter_warns() -> None:
    saved = Ranks(lambda: Repeating(range(48), batch_size=2), 1)  # type: ignore[arg-type]
    saved.begin(0)
    saved.read(4)
    again = Ranks(lambda: Repeating(range(48), batch_size=3), 1)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"since Repeating\.__iter__ makes the batches"):
        again.resume(saved)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_another_batch_size_of_a_stream_warns() -> None:
    saved = Ranks(lambda: DataLoader(Numbers(), batch_size=4), 1)
    saved.begin(0)
    saved.read(2)
    again = Ranks(lambda: DataLoader(Numbers(), batch_size=3), 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again.resume(saved)
    told = [str(one.message) for one in warned]
    assert any("with batches of 4, and now there are 1 with batches of 3" in text for text in told)
    again.begin(0)
    assert again.read(1) == [6, 7, 8]
