"""A data loader that goes on in the middle of an epoch, with the samples that are still to come."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stratagem.data.index_sequence import RULES, TORCH, IndexSequence, draw_all
from stratagem.data.resume.resumable_sampler import (
    ResumableSampler,
    checksum,
    has_exact_length,
    innermost,
)
from stratagem.data.sharding import (
    ShardedSampler,
    has_persistent_workers,
    length_of,
    sampler_of,
)
from stratagem.errors import format_value
from stratagem.rng import (
    SeededOnce,
    generator_states,
    generators_of_data,
    generators_of_dataset,
    generators_of_loader,
    preserve_rng_state,
    rng_state,
    seed_host,
    set_generator_states,
    set_rng_state,
)


@dataclass(frozen=True)
class Order:
    """How the order of an epoch's samples is drawn, of which ranks read every n-th one.

    Attributes:
        kind: "sharded": by the loader's sampler under a seed that ranks share; "distributed": by
            torch's DistributedSampler; "whole": by the loader's sampler alone, for one reader.
        sampler: the loader's own.
        seed: with the epoch, what the order follows from; None with "whole".
    """

    kind: str
    sampler: Any
    seed: int | None

    def draw(
        self,
        seed: int | None,
        epoch: int,
        start: dict[str, Any],
        generators: Sequence[Any],
        rule: str | None,
    ) -> IndexSequence:
        """Return an epoch's indices of all ranks; global RNG states stay as they are.

        Args:
            seed: the one that the order was drawn with at first; None: it was drawn by one reader.
            epoch: which.
            start: the RNG states when it was drawn.
            generators: that the sampler may draw from.
            rule: what shuffles; None: see `index_sequence.rule_of`.
        """
        if self.kind == "distributed":
            all_of_it = copy.copy(self.sampler)
            all_of_it.num_replicas, all_of_it.rank = 1, 0
            all_of_it.num_samples = all_of_it.total_size = len(all_of_it.dataset)
            all_of_it.seed, all_of_it.epoch = seed, epoch
            return draw_all(all_of_it, rule)
        if seed is None:
            before = generator_states(generators)
            with preserve_rng_state():
                set_rng_state(start)
                set_generator_states(generators, start["generators"])
                order = draw_all(self.sampler, rule)
            set_generator_states(generators, before)
            return order
        sharded = ShardedSampler(self.sampler, 0, 1, even=False, seed=seed)
        sharded.set_epoch(epoch)
        return sharded.order(rule)


def order_of(loader: DataLoader[Any], shards: int) -> Order | str:
    """Return how a loader's order is drawn, or why that is not known.

    Args:
        loader: of a dataset that is read by index.
        shards: how many parts the data are to be divided into.
    """
    batch_sampler, sampler = loader.batch_sampler, sampler_of(loader)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return f"its batch sampler ({type(batch_sampler).__name__}) makes the batches"
    if isinstance(sampler, ShardedSampler):
        return Order("sharded", sampler.sampler, sampler.seed)
    if type(sampler) is DistributedSampler:
        return Order("distributed", sampler, sampler.seed)
    if hasattr(sampler, "num_replicas"):
        return f"its sampler ({type(sampler).__name__}) divides the data"
    if shards > 1:
        return "its data were divided by whoever made it"
    return Order("whole", sampler, None)


@dataclass(frozen=True)
class Reshard:
    """The rest of an epoch, resharded anew to ranks that are not as many as began it.

    Attributes:
        seed: of the epoch's order; None: it was drawn by one reader.
        samples: how many of that order were read before.
        batches: how many batches of the new ranks' size that is, on each, rounded down.
    """

    seed: int | None
    samples: int
    batches: int

    def part(self, order: IndexSequence, loader: DataLoader[Any], index: int, count: int) -> Any:
        """Return what one rank's loader takes its indices from, in this epoch.

        Args:
            order: the epoch's, of all ranks.
            loader: of the rank.
            index, count: which part, of how many.
        """
        rest = order[self.samples :]
        if getattr(sampler_of(loader), "drop_last", False):  # DistributedSampler's
            rest = rest[: len(rest) // count * count]
        mine = rest.shard(index, count, even=True)
        batches: Any = loader.batch_sampler
        return (
            mine if batches is None else BatchSampler(mine, batches.batch_size, batches.drop_last)
        )


_OVERLAPS = "some samples of this epoch may be read twice and others not at all"


class Resumable:
    """Iterates over a loader from any batch of an epoch on.

    The user's DataLoader is kept; what it takes its indices from is wrapped, so that the batches
    before are passed over without being read. A sampler that draws from the global RNGs,
    or from a generator that it, the loader or the dataset holds, draws again what it drew. Workers
    are seeded for each batch, by the state at the start of the epoch and the batch's number, so
    that random augmentation repeats as well; not if their `worker_init_fn` is a `SeededOnce`.

    An IterableDataset without workers, or a loader that reads no dataset by index, goes on by its
    own state if it has `state_dict` and `load_state_dict`. Of others batches are read and passed
    over. (A StatefulDataLoader that reads by index is resumed as any DataLoader: its own state
    knows nothing of the RNG states in workers.)

    Ranks that are not as many as saved, or that take batches of another size, go on after the same
    samples of the epoch's order: the rest is resharded to them in turn.

    Args:
        loader: of this rank.
        name: stands for it in messages.
        rank: whose; workers of different ranks get different seeds, and rank 0 warns.
        shard: this rank's part of the data, (index, count).

    Attributes:
        loader: what is iterated over; the user's loader, or a copy of it with wrapped indices.
        inexact: why a resumed run differs from one that was not interrupted; "" if it does not.
        left: batches of the present epoch that `begin` has yet to yield, where they were dealt out
            again to other ranks; infinity: as many as the loader's length says.
        has_exact_length: whether it yields exactly as many batches as its length says.
    """

    def __init__(
        self, loader: Any, name: str, rank: int = 0, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self.loader = loader
        self.inexact = ""
        self.left = math.inf
        self.has_exact_length = has_exact_length(loader)
        self._name = name
        self._rank = rank
        self._shard = shard
        self._generators: list[Any] = []
        self._order: Order | str = f"which samples a rank reads is up to {name}"
        self._indices: ResumableSampler | None = None
        self._stateful: Any = None
        """What has a state of its own: the loader, its dataset, or None."""
        self._reshard: Reshard | None = None
        self._resumed: dict[str, Any] | None = None
        self._warned = False
        self._start: list[Any] = []
        """The states of the generators when the epoch began, of what is not read by index."""
        self._had_workers = False
        """Whether the run that is resumed had persistent workers by now."""
        reads_by_index = isinstance(loader, DataLoader) and not isinstance(
            loader.dataset, IterableDataset
        )
        if not reads_by_index and not getattr(loader, "num_workers", 0):
            self._generators = generators_of_data(loader)
        if _has_state(loader) and not reads_by_index:
            self._stateful = loader
        elif isinstance(loader, (list, tuple)):
            pass  # it yields the same in each process
        elif not isinstance(loader, DataLoader):
            self.inexact = (
                f"{name} is a {type(loader).__name__}, of which the batches before are read and "
                "passed over: they are right if it yields the same ones in each process"
            )
        elif reads_by_index:
            self._wrap(loader)
        elif _has_state(loader.dataset) and loader.num_workers == 0:
            self._stateful = loader.dataset
        else:
            in_workers = "; its state_dict is in the workers" if _has_state(loader.dataset) else ""
            self.inexact = (
                f"the dataset of {name} is an IterableDataset, of which the batches before are "
                "read and passed over: they are right if it yields the same ones in each process"
                f"{in_workers}. An IterableDataset that has state_dict and load_state_dict goes on "
                "by its own state with num_workers=0; so does a loader that has them, such as "
                "torchdata's StatefulDataLoader"
            )

    def _wrap(self, loader: DataLoader[Any]) -> None:
        is_batched = loader.batch_sampler is not None
        inner = loader.batch_sampler if is_batched else loader.sampler
        with_workers = loader.num_workers > 0
        held_by_data = generators_of_dataset(loader.dataset)
        self._generators = (generators_of_loader if with_workers else generators_of_data)(loader)
        if with_workers and held_by_data:
            self.inexact = (
                f"the dataset of {self._name} holds a {type(held_by_data[0]).__name__}, of which "
                "each worker has a copy whose state is not known: draw from random, numpy.random "
                "or torch instead, which are seeded for each batch, or pass num_workers=0"
            )
        if with_workers and not getattr(loader, "in_order", True):
            self.inexact = f"{self._name} has in_order=False, so its batches come in any order"
        seeds_batches = with_workers and not isinstance(loader.worker_init_fn, SeededOnce)
        self._order = order_of(loader, self._shard[1])
        self._user_loader = loader
        self._indices = ResumableSampler(
            inner,
            self._generators,
            is_batched=is_batched,
            first_seed=self._rank * 15_485_863 if seeds_batches else None,
        )
        # DataLoader refuses assignments to these after __init__; a copy avoids guessing the
        # arguments of a subclass's constructor.
        wrapped = copy.copy(loader)
        wrapped.__dict__["batch_sampler" if is_batched else "sampler"] = self._indices
        wrapped.__dict__["_iterator"] = None
        if seeds_batches:
            wrapped.__dict__["dataset"] = _SeededDataset(loader.dataset)
        self.loader = wrapped

    @property
    def batch_size(self) -> int:
        """Samples in a batch; 1 where the loader does not say."""
        size = getattr(self.loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(self.loader, "batch_sampler", None), "batch_size", None)
        return size if isinstance(size, int) else 1

    def batches_left(self, done: int) -> float:
        """Return the batches of the present epoch after the first `done`; infinity: not known."""
        if self.left != math.inf:
            return self.left
        return length_of(self.loader) - done if self.has_exact_length else math.inf

    def end_of_epoch(self) -> tuple[int, int, int] | None:
        """Return the samples of this rank's epoch and of its last batch, and the repeated ones.

        The last sample may be one of another rank, repeated so that all ranks have as many. None:
        the data are not dealt out to ranks sample by sample.
        """
        if not isinstance(self._order, Order) or self._order.kind == "whole":
            return None
        index, count = self._shard
        sampler, dealt = self._order.sampler, sampler_of(self._user_loader)
        is_distributed = self._order.kind == "distributed"
        if is_distributed and (sampler.drop_last or sampler.num_replicas != count):
            return None
        total = len(sampler.dataset if is_distributed else sampler)
        total -= 0 if self._reshard is None else self._reshard.samples
        even = self._reshard is not None or getattr(dealt, "even", True)
        own = -(-total // count) if even else len(range(index, total, count))
        repeated = int(even and 0 < total % count <= index)
        last = own % self.batch_size
        if not last or not getattr(self._user_loader, "drop_last", False):
            return own, last or self.batch_size, repeated
        return own - last, self.batch_size, 0

    # -- going on

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Take what `state` returned on each rank; the next `begin` goes on from there.

        Args:
            states: of the ranks that saved, in their order.
            batches: those of the epoch that each of them had yielded; 0: it is at its start.

        Returns:
            How many of this loader's batches that is.
        """
        first = states[0]
        # That of this rank first: each is decoded when it is looked at.
        tried = chain(states[self._rank : self._rank + 1], states)
        own = next((s for s in tried if s.get("shard", 0) == self._shard[0]), None)
        if isinstance(self._order, Order) and first.get("order") == self._order.kind:
            self._take_seed(first.get("seed"))
        if batches == 0:
            if own is not None:
                set_generator_states(self._generators, own.get("generators", ()))
                self._had_workers = own.get("had_workers", False)
            return 0
        before = Reshard(**first["deal"]) if first.get("deal") else Reshard(first.get("seed"), 0, 0)
        shards, batch_size = first.get("shards", len(states)), first.get("batch_size", 1)
        samples = before.samples + (batches - before.batches) * batch_size * shards
        is_same_order = self._check_same_order(first, samples)
        is_dealt = own is None or any(own.get(k) != v for k, v in self._layout().items())
        reason = self._why_not_resharded(first) if is_dealt else ""
        if is_same_order and not reason:
            is_same_order = self._check_same_kinds(first.get("kinds", {}))
        if own is not None and not is_dealt:
            # What was said already is not found once more.
            self._resumed = own if is_same_order else {**own, "first": None}
            return batches
        converted: int = samples // (self.batch_size * self._shard[1])
        if reason:
            self._warn(
                f"the checkpoint was saved in the middle of an epoch, by {shards} reader(s) of "
                f"{self._name} with batches of {batch_size}, and now there are {self._shard[1]} "
                f"with batches of {self.batch_size}: {_OVERLAPS}, since {reason}"
            )
        else:
            self._resumed = {
                "start": first["start"],
                "rule": first.get("rule"),
                "deal": asdict(Reshard(before.seed, samples, converted)),
                "first": first.get("first") if is_same_order else None,
                "began": [before.samples, first.get("shard", 0), shards, batch_size],
                "generators": [] if own is None else own["generators"],
            }
        return converted

    def _check_same_order(self, first: dict[str, Any], read: int) -> bool:
        """Whether the epoch's order can be what it was; warns if it is certain that it cannot.

        Args:
            first: the state of the first rank that saved.
            read: samples of the epoch that all ranks had read by then.
        """
        length, now = first.get("length"), self._length()
        if length is not None and now is not None and length != now:
            follows = _OVERLAPS
            if now < read:
                follows = f"fewer than the {read} that were read: nothing of this epoch is left"
            self._warn(
                f"the checkpoint was saved in the middle of an epoch, with {length} samples in the "
                f"dataset of {self._name}, and now there are {now}: {follows}. Resume with the "
                "dataset that it was saved with, or from a checkpoint of the end of an epoch"
            )
            return False
        if first.get("rule", TORCH) not in (None, *RULES):
            self._warn(
                f"the order of {self._name} was drawn by {first['rule']!r} when the checkpoint was "
                f"saved, in the middle of an epoch, and this version of Stratagem knows "
                f"{', '.join(map(repr, RULES))}: {_OVERLAPS}. Resume with the version that saved "
                "it, or from a checkpoint of the end of an epoch"
            )
            return False
        return True

    def _check_same_kinds(self, before: dict[str, str]) -> bool:
        """Whether samplers and dataset are of the types that they were; warns if they are not."""
        changed = {k: v for k, v in self._kinds().items() if before.get(k, v) != v}
        for what, kind in changed.items():
            self._warn(
                f"the checkpoint was saved in the middle of an epoch, when the {what} of "
                f"{self._name} was a {format_value(before[what])}, and now it is a {kind!r}: "
                f"{_OVERLAPS}. Resume with what it was saved with, or from a checkpoint of the end "
                "of an epoch"
            )
            return False
        return True

    def _length(self) -> int | None:
        """Return the number of samples in the dataset; None: not known."""
        dataset = None if self._indices is None else self._user_loader.dataset
        length = length_of(dataset)
        return None if length == math.inf else int(length)

    def _kinds(self) -> dict[str, str]:
        """Return the types of what decides which samples a batch has."""
        if self._indices is None:
            return {}
        loader = self._user_loader
        return {
            "dataset": type(loader.dataset).__name__,
            "batch sampler": type(loader.batch_sampler or BatchSampler([], 1, False)).__name__,
            "sampler": type(innermost(sampler_of(loader))).__name__,
        }

    def _layout(self) -> dict[str, Any]:
        """Return what must be alike for a rank to go on in its own part of the data."""
        if self._indices is None:
            return {"shards": self._shard[1]}
        return {"shards": self._shard[1], "batch_size": self.batch_size, "order": self._kind()}

    def _kind(self) -> str:
        return self._order.kind if isinstance(self._order, Order) else ""

    def _take_seed(self, seed: int | None) -> None:
        """Draw the orders of the run that is resumed, whatever seed this one was given."""
        sampler = sampler_of(self._user_loader)
        if seed is not None:
            sampler.seed = seed

    def _why_not_resharded(self, first: dict[str, Any]) -> str:
        if isinstance(self._order, str):
            return self._order
        if (first.get("order") == "distributed") is not (self._order.kind == "distributed"):
            return "they were divided by another sampler"
        return "" if first.get("order") else "the order in which they were read is not known"

    def begin(self, epoch: int, done: int, of: float = math.inf) -> tuple[Iterator[Any], list[Any]]:
        """Return the batches of an epoch after the first `done`, and the last before them.

        The last one is returned only where it was read.

        Args:
            epoch: which.
            done: how many to pass over.
            of: how many there are; infinity: not known.
        """
        resumed, self._resumed = self._resumed, None
        if self._indices is None:
            is_over = 0 < of <= done
            # At the end of an epoch, a state would be that of an iteration that never begins.
            begun = (iter(()), []) if is_over else self._read_over(done, resumed)
            if resumed is not None:
                set_generator_states(self._generators, resumed.get("generators", ()))
            return begun
        self.left, self._reshard, resharded = math.inf, None, None
        if resumed is None:
            start = None
            if self._had_workers:
                # Workers are started again, for which the loader draws a number that the run that
                # is resumed has not drawn here.
                start = {**rng_state(), "generators": generator_states(self._generators)}
                self._had_workers = False
            self._indices.begin(epoch, done, start)
            return iter(self.loader), []
        passed_over, number, start = done, 0, resumed.get("start")
        # A state without a rule was shuffled by torch.
        rule = resumed.get("rule") or TORCH
        rule = rule if rule in RULES else None
        began = resumed.get("began")
        if resumed.get("deal"):
            assert isinstance(self._order, Order)
            self._reshard = Reshard(**resumed["deal"])
            order = self._order.draw(
                self._reshard.seed, epoch, resumed["start"], self._generators, rule
            )
            resharded = self._reshard.part(order, self._user_loader, *self._shard)
            if began and resumed.get("first") not in (None, *_first_of(order, *began)):
                self._warn_of_order()
            passed_over = done - self._reshard.batches
            self.left = len(resharded) - passed_over
            number = self._reshard.samples
        self._indices.begin(epoch, passed_over, start, resharded, number, rule)
        batches = iter(self.loader)
        # Only now: a loader draws a number of its own before it takes the first index.
        self._indices.prime()
        if not began and resumed.get("first") not in (None, self._indices.first):
            self._warn_of_order()
        set_generator_states(self._generators, resumed["generators"])
        return batches, []

    def _warn_of_order(self) -> None:
        self._warn(
            f"the samples of {self._name} do not come in the order that they had when the "
            "checkpoint was saved, so that some of this epoch may be read twice and others not at "
            f"all: its sampler ({type(sampler_of(self._user_loader)).__name__}) draws from what is "
            "not in the checkpoint, or the data have changed"
        )

    def pass_over(self) -> None:
        """Leave out the rest of the epoch that is resumed: this loader was at its end."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_generator_states(self._generators, resumed.get("generators", ()))

    def _read_over(
        self, done: int, resumed: dict[str, Any] | None
    ) -> tuple[Iterator[Any], list[Any]]:
        if self._stateful is not None and resumed is not None and "own" in resumed:
            self._stateful.load_state_dict(resumed["own"])
            return iter(self.loader), []
        if resumed is not None:
            set_generator_states(self._generators, resumed.get("begun", ()))
        self._start = generator_states(self._generators)
        batches = iter(self.loader)
        last: list[Any] = []
        for batch in islice(batches, done):
            last = [batch]
        return batches, last

    def close(self) -> None:
        """End persistent workers, which no other iteration will use."""
        if self._indices is not None:
            # Let go of here, in order: found by the garbage collector, each takes 5 s to end.
            self.loader.__dict__["_iterator"] = None

    # -- saving

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return what `resume` needs of this rank; weights-only-safe data.

        Warns, once and on rank 0, if a resume would not be exact.

        Args:
            within_epoch: whether batches of the present epoch are left; a resume after its last
                one begins the next, and has nothing to find again.
        """
        if within_epoch and not self._warned:
            self._warn_if_inexact()
        index, count = self._shard
        state: dict[str, Any] = {"shard": index, "shards": count, "batch_size": self.batch_size}
        if self._indices is not None:
            state["had_workers"] = has_persistent_workers(self.loader)
            state["order"] = self._kind()
            state["seed"] = self._seed()
            state["first"] = self._indices.first
            state["rule"] = self._indices.rule
            state["length"] = self._length()
            state["kinds"] = self._kinds()
            state["generators"] = generator_states(self._generators)
            state["deal"] = None if self._reshard is None else asdict(self._reshard)
            if self._indices.start is not None:
                state["start"] = self._indices.start
        elif self._generators:
            state["generators"] = generator_states(self._generators)
            state["begun"] = self._start
        if self._stateful is not None:
            state["own"] = self._stateful.state_dict()
        return state

    def _warn_if_inexact(self) -> None:
        if self._indices is not None:
            if self._indices.start is None:
                return  # no batch of it was read yet
            if not self.inexact and (reason := self._indices.why_not_drawn_again()):
                self.inexact = f"the sampler of {self._name} {reason}"
        self._warned = True
        if self.inexact:
            self._warn(
                "a run that resumes from this checkpoint in the middle of an epoch may differ: "
                + self.inexact
            )

    def _seed(self) -> int | None:
        if isinstance(self._order, Order) and self._order.kind != "whole":
            return int(sampler_of(self._user_loader).seed)
        return None

    def _warn(self, message: str) -> None:
        if self._rank == 0:
            warnings.warn(message, stacklevel=3)


def _first_of(
    order: IndexSequence, begin: int, index: int, count: int, batch_size: int
) -> list[int | None]:
    """Return the checksums that a rank's first batch has in an order, as batch and as one sample.

    Args:
        order: of all ranks.
        begin: where in it these ranks began.
        index, count: which part of the rest the rank reads.
        batch_size: how many samples of it.
    """
    drawn = order[begin:].shard(index, count, even=True)[:batch_size].tolist()
    return [checksum([drawn]), checksum(drawn)]


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class _SeededDataset:
    """A dataset in a worker, whose random numbers follow from the batch's seed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        if hasattr(dataset, "__getitems__"):
            self._read = dataset.__getitems__
        else:
            self._read = self._one_by_one

    def _one_by_one(self, indices: list[Any]) -> list[Any]:
        return [self._dataset[index] for index in indices]

    def __getitems__(self, seed_and_indices: list[Any]) -> Any:
        seed_host(seed_and_indices[0])
        return self._read(seed_and_indices[1:])

    def __getitem__(self, seed_and_index: tuple[int, Any]) -> Any:
        seed_host(seed_and_index[0])
        return self._dataset[seed_and_index[1]]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "_read"):
            raise AttributeError(name)  # while it is pickled to a worker, for one
        return getattr(self._dataset, name)
