"""A data loader that resumes in the middle of an epoch, with the remaining samples."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stratagem.checkpoint.forms import Count, Nothing, Positive, require_form
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
    iterator_of,
    length_of,
    sampler_of,
)
from stratagem.errors import format_value
from stratagem.rng import (
    SeededOnce,
    generator_states,
    generators_held_by_data,
    generators_of_data,
    generators_of_loader,
    preserve_rng_state,
    rng_state,
    seed_host,
    set_generator_states,
    set_rng_state,
    try_rng_state,
)

_MAYBE = (Nothing, Count)
_FORM = {
    "shard?": Count,
    "shards?": Positive,
    "batch_size?": Positive,
    "had_workers?": bool,
    "order?": str,
    "seed?": (Nothing, int),
    "first?": _MAYBE,
    "rule?": (Nothing, str),
    "length?": _MAYBE,
    "kinds?": {str: str},
    "generators?": list,
    "deal?": (Nothing, {"seed": (Nothing, int), "samples": Count, "batches": Count}),
    "start?": {"python": list, "torch": object, "generators": list},
    "own?": object,
    "before_last?": object,
    "ended?": bool,
    "begun?": list,
}


@dataclass(frozen=True)
class Order:
    """The source of the order of an epoch's samples; each rank reads every n-th sample.

    Attributes:
        kind: "sharded" draws with the loader's sampler and a seed that ranks share. "distributed"
            draws with torch's DistributedSampler. "whole" draws with the loader's sampler alone,
            for one reader.
        sampler: the loader's own sampler.
        seed: the seed that determines the order, with the epoch; None with "whole".
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
        """Return an epoch's indices of all ranks, without changing global RNG states.

        Args:
            seed: the seed of the first drawing; None if the order was drawn by one reader.
            epoch: the number of the epoch.
            start: the RNG states at the first drawing.
            generators: the generators that the sampler may draw from.
            rule: the shuffling rule; None selects `index_sequence.rule_of`.
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
    """Return the source of a loader's order, or the reason why the order is unknown.

    Args:
        loader: the loader of a map-style dataset.
        shards: the number of parts of the data.
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
    """The rest of an epoch, resharded to another number of ranks.

    Attributes:
        seed: the seed of the epoch's order; None if the order was drawn by one reader.
        samples: the number of samples of the order that were read before.
        batches: the same in batches of each new rank, rounded down.
    """

    seed: int | None
    samples: int
    batches: int

    def part(self, order: IndexSequence, loader: DataLoader[Any], index: int, count: int) -> Any:
        """Return the source of indices for a rank's loader, in this epoch.

        Args:
            order: the epoch's order, of all ranks.
            loader: the loader of the rank.
            index, count: the number of the part, and the number of parts.
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

    The user's DataLoader is kept. Its source of indices is wrapped, so that earlier batches are
    skipped without being read. A sampler that draws from the global RNGs, or from a generator of
    the sampler, the loader or the dataset, draws the same order again. Workers are seeded for each
    batch, from the state at the start of the epoch and the batch's number, so that random
    augmentation repeats as well; not if their `worker_init_fn` is a `SeededOnce`.

    An IterableDataset without workers, or a loader without a map-style dataset, resumes from its
    own state if it has `state_dict` and `load_state_dict`. Otherwise its batches are read and
    skipped. (A StatefulDataLoader with a map-style dataset is resumed like any DataLoader, since
    its own state does not include the RNG states in workers.)

    If the number of ranks or the batch size has changed, the ranks resume after the same samples of
    the epoch's order: the rest is resharded.

    Args:
        loader: the loader of this rank.
        name: the name of the loader in messages.
        rank: this rank. Workers of different ranks get different seeds, and only rank 0 warns.
        shard: this rank's part of the data, (index, count).

    Attributes:
        loader: the loader to iterate over: the user's loader, or a copy with wrapped indices.
        inexact: the reason why a resumed run differs from an uninterrupted one; "" if it does not.
        left: the remaining batches of the epoch, if the rest was resharded to other ranks;
            otherwise infinity, and the loader's length counts.
        has_exact_length: whether the loader yields exactly `len(loader)` batches.
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
        self._fetcher: Any = None
        self._stateful: Any = None
        """The object with a state of its own: the loader, its dataset, or None."""
        self._before_last: Any = None
        """Its state before the last batch of an epoch that ends before the data do."""
        self._reshard: Reshard | None = None
        self._resumed: dict[str, Any] | None = None
        self._warned = False
        self._start: list[Any] = []
        """The generators' states at the start of the epoch, for data not read by index."""
        self._had_workers = False
        """Whether the resumed run had already started persistent workers."""
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
        held_by_data = generators_held_by_data(loader)
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
        """The number of samples in a batch; 1 if unknown."""
        size = getattr(self.loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(self.loader, "batch_sampler", None), "batch_size", None)
        return size if isinstance(size, int) else 1

    def batches_left(self, done: int) -> float:
        """Return the number of batches of the epoch after the first `done`; infinity if unknown."""
        if self.left != math.inf:
            return self.left
        return length_of(self.loader) - done if self.has_exact_length else math.inf

    def end_of_epoch(self) -> tuple[int, int, int] | None:
        """Return the number of samples of this rank's epoch, of its last batch, and repeated ones.

        The last sample may be a repeated sample of another rank, so that all ranks have the same
        number. Return None if the data are not sharded sample by sample.
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
        """Load the states of all ranks; the next `begin` resumes from them.

        Args:
            states: the return values of `state`, in the order of the ranks that saved.
            batches: the number of batches that each of these ranks had yielded in the epoch; 0 at
                its start.

        Returns:
            The same position as a number of this loader's batches.
        """
        checked = partial(require_form, form=_FORM, name=f"position in {self._name}")
        first = checked(states[0])
        # This rank's state first, since each state is decoded on access.
        tried = map(checked, chain(states[self._rank : self._rank + 1], states))
        own = next((s for s in tried if s.get("shard", 0) == self._shard[0]), None)
        self._try(own or first)
        if isinstance(self._order, Order) and first.get("order") == self._order.kind:
            self._take_seed(first.get("seed"))
        if batches == 0:
            if own is not None:
                self._read_last_again(own)
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
            # Do not repeat a warning.
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
                "generators": [] if own is None else own.get("generators", ()),
            }
        return converted

    def _read_last_again(self, own: dict[str, Any]) -> None:
        """Bring a stream to where an epoch has left it; it may go on there, or begin again."""
        if self._stateful is None or "before_last" not in own:
            return
        if own.get("shards") == self._shard[1]:
            with preserve_rng_state():
                self._stateful.load_state_dict(own["before_last"])
                next(iter(self.loader), None)
            self._before_last = own["before_last"]
        else:
            self._warn(
                f"the checkpoint has positions of {own.get('shards')} reader(s) of {self._name}, "
                f"and now there are {self._shard[1]}: each begins at the beginning. Resume with as "
                "many as before to go on where they were"
            )

    def _try(self, saved: dict[str, Any]) -> None:
        """Raise if RNG states cannot be restored; they are restored when the epoch begins."""
        start = saved.get("start") or rng_state()
        for states in (start.get("generators"), saved.get("generators"), saved.get("begun")):
            try_rng_state(start, self._generators, states or ())

    def _check_same_order(self, first: dict[str, Any], read: int) -> bool:
        """Return whether the epoch's order may be the same; warn if it certainly differs.

        Args:
            first: the state of the first rank that saved.
            read: the number of samples of the epoch that all ranks had read.
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
        """Return whether samplers and dataset have the same types as before; warn if not."""
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
        """Return the number of samples in the dataset; None if unknown."""
        dataset = None if self._indices is None else self._user_loader.dataset
        length = length_of(dataset)
        return None if length == math.inf else int(length)

    def _kinds(self) -> dict[str, str]:
        """Return the types of the dataset and the samplers, which determine the batches."""
        if self._indices is None:
            return {}
        loader = self._user_loader
        return {
            "dataset": type(loader.dataset).__name__,
            # Compare with None: a sampler without `__len__` has no truth value.
            "batch sampler": "BatchSampler"
            if loader.batch_sampler is None
            else type(loader.batch_sampler).__name__,
            "sampler": type(innermost(sampler_of(loader))).__name__,
        }

    def _layout(self) -> dict[str, Any]:
        """Return the values that must not change for a rank to resume in its own part."""
        if self._indices is None:
            return {"shards": self._shard[1]}
        return {"shards": self._shard[1], "batch_size": self.batch_size, "order": self._kind()}

    def _kind(self) -> str:
        return self._order.kind if isinstance(self._order, Order) else ""

    def _take_seed(self, seed: int | None) -> None:
        """Set the seed of the resumed run, instead of this run's own seed."""
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
        """Return an iterator over an epoch's batches after the first `done`, and the last before.

        The last batch before is returned, in a list, only if it was read.

        Args:
            epoch: the number of the epoch.
            done: the number of batches to skip.
            of: the number of batches of the epoch; infinity if unknown.
        """
        resumed, self._resumed = self._resumed, None
        if self._indices is None:
            is_over = 0 < of <= done
            # At the end of an epoch, the state would belong to an iteration that never begins.
            if is_over:
                self._read_last_again(resumed or {})
            limit = of if of < length_of(self.loader) else math.inf
            begun = self._at_end() if is_over else self._read_over(done, resumed, limit)
            if resumed is not None:
                set_generator_states(self._generators, resumed.get("generators", ()))
            return begun
        self.left, self._reshard, resharded = math.inf, None, None
        if resumed is None:
            start = None
            if self._had_workers:
                # Starting workers again draws a number that the resumed run has not drawn here.
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
        # Only now, since a loader draws its own number before it reads the first index.
        self._indices.prime()
        if not began and resumed.get("first") not in (None, self._indices.first):
            self._warn_of_order()
        set_generator_states(self._generators, resumed.get("generators", ()))
        return batches, []

    def _warn_of_order(self) -> None:
        self._warn(
            f"the samples of {self._name} do not come in the order that they had when the "
            "checkpoint was saved, so that some of this epoch may be read twice and others not at "
            f"all: its sampler ({type(sampler_of(self._user_loader)).__name__}) draws from what is "
            "not in the checkpoint, or the data have changed"
        )

    def pass_over(self) -> None:
        """Skip the rest of the resumed epoch, since this loader was at its end."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_generator_states(self._generators, resumed.get("generators", ()))

    def _read_over(
        self, done: int, resumed: dict[str, Any] | None, limit: float
    ) -> tuple[Iterator[Any], list[Any]]:
        if self._stateful is not None and resumed is not None and "own" in resumed:
            self._stateful.load_state_dict(resumed["own"])
            if resumed.get("ended"):  # the last batch was short
                # One that had yet to notice its end has done so now, and the next epoch begins.
                if next(iter(self.loader), None) is not None:
                    self._stateful.load_state_dict(resumed["own"])
                return self._at_end()
            return self._iterate(limit - done, resumed["own"]), []
        if resumed is not None:
            set_generator_states(self._generators, resumed.get("begun", ()))
        self._start = generator_states(self._generators)
        batches = self._iterate(limit)
        last: list[Any] = []
        for batch in islice(batches, done):
            last = [batch]
        return batches, last

    def _at_end(self) -> tuple[Iterator[Any], list[Any]]:
        self._fetcher = SimpleNamespace(ended=True)
        return iter(()), []

    def _iterate(self, left: float, loaded: Any = None) -> Iterator[Any]:
        """Return an iterator over the loader; only what says whether its data ended is kept."""
        batches = iterator_of(self.loader)
        self._fetcher = getattr(batches, "_dataset_fetcher", None)  # of a DataLoader, no workers
        self._before_last = None
        if self._stateful is None or left == math.inf:
            return batches
        return self._note_before_last(batches, int(left), loaded)

    def _note_before_last(self, batches: Iterator[Any], left: int, loaded: Any) -> Iterator[Any]:
        yield from islice(batches, left - 1)
        # Before its first batch, the loader may not have applied its loaded state.
        use_loaded = left == 1 and loaded is not None
        self._before_last = loaded if use_loaded else self._stateful.state_dict()
        yield from batches
        self._before_last = None  # the data have ended, too

    def close(self) -> None:
        """End persistent workers, after the last iteration."""
        if self._indices is not None:
            # Release them here, in order: under the garbage collector, each takes 5 s to end.
            self.loader.__dict__["_iterator"] = None

    # -- saving

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`, as weights-only-safe data.

        Rank 0 warns once if a resume would not be exact.

        Args:
            within_epoch: whether the epoch has batches left. A resume after its last batch begins
                the next epoch, and needs no position.
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
            state["ended"] = bool(getattr(self._fetcher, "ended", False))
            if self._before_last is not None:
                state["before_last"] = self._before_last
        return state

    def _warn_if_inexact(self) -> None:
        if self._indices is not None:
            if self._indices.start is None:
                return  # no batch was read yet
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
    """Return the checksums of a rank's first batch in an order, as a batch and as one sample.

    Args:
        order: the order of all ranks.
        begin: the position in the order where these ranks began.
        index, count: the number of the rank's part of the rest, and the number of parts.
        batch_size: the number of samples in a batch.
    """
    drawn = order[begin:].shard(index, count, even=True)[:batch_size].tolist()
    return [checksum([drawn]), checksum(drawn)]


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class _SeededDataset:
    """A dataset in a worker that seeds the RNGs with the batch's seed."""

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
            raise AttributeError(name)  # for example during the pickling for a worker
        return getattr(self._dataset, name)
