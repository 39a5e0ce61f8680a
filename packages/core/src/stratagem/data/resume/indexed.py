"""A resumable DataLoader with a map-style dataset: it skips indices, and reads no sample twice."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from stratagem import rng
from stratagem.data.index_sequence import RULES, TORCH, IndexSequence, draw_all
from stratagem.data.resume.resumable import OVERLAP, Begun, Reshard, Resumable, SavedPosition
from stratagem.data.resume.resumable_sampler import ResumableSampler, checksum, innermost
from stratagem.data.sharding import (
    ShardedSampler,
    copy_loader,
    has_persistent_workers,
    length_of,
    sampler_of,
    yields_what_it_reads,
)
from stratagem.errors import format_value


@dataclass(frozen=True)
class Order:
    """The source of the order of an epoch's samples; each rank reads every n-th sample.

    Attributes:
        kind: "sharded" draws with the loader's sampler and a seed that ranks share. "distributed"
            draws with torch's DistributedSampler. "whole" draws with the loader's sampler alone,
            for one reader. "" if the order is unknown.
        sampler: the loader's own sampler.
        unknown: the reason why the order is unknown.
    """

    kind: str
    sampler: Any = None
    unknown: str = ""

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
            before = rng.generator_states(generators)
            with rng.preserve_rng_state():
                rng.set_rng_state(start)
                rng.set_generator_states(generators, start["generators"])
                order = draw_all(self.sampler, rule)
            rng.set_generator_states(generators, before)
            return order
        sharded = ShardedSampler(self.sampler, 0, 1, even=False, seed=seed)
        sharded.set_epoch(epoch)
        return sharded.order(rule)


def order_of(loader: DataLoader[Any], shards: int) -> Order:
    """Return the source of a loader's order.

    Args:
        loader: the loader of a map-style dataset.
        shards: the number of parts of the data.
    """
    batch_sampler, sampler = loader.batch_sampler, sampler_of(loader)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        reason = f"its batch sampler ({type(batch_sampler).__name__}) makes the batches"
        return Order("", unknown=reason)
    if isinstance(sampler, ShardedSampler):
        return Order("sharded", sampler.sampler)
    if type(sampler) is DistributedSampler:
        return Order("distributed", sampler)
    if hasattr(sampler, "num_replicas"):
        return Order("", unknown=f"its sampler ({type(sampler).__name__}) divides the data")
    if shards > 1:
        return Order("", unknown="its data were divided by whoever made it")
    return Order("whole", sampler)


@dataclass(frozen=True)
class _Resumed:
    """The saved position from which the next epoch begins.

    Attributes:
        state: a saved state of the order, of this rank's part or of the first rank.
        generators: the generators' states when the checkpoint was saved.
        first: the checksum of the first batch; None is not compared.
        reshard: where the epoch is resharded; None: this rank continues in its own part.
        saved: the position of the ranks that saved, if this resume is what reshards.
    """

    state: dict[str, Any]
    generators: Sequence[Any]
    first: int | None
    reshard: Reshard | None
    saved: SavedPosition | None = None


class IndexedLoader(Resumable):
    """A DataLoader with a map-style dataset, which skips the indices of earlier batches.

    The user's DataLoader is kept. Its source of indices is wrapped, so that earlier batches are
    skipped without being read. A sampler that draws from the global RNGs, or from a generator of
    the sampler, the loader or the dataset, draws the same order again. Workers are seeded for each
    batch, from the state at the start of the epoch and the batch's number, so that random
    augmentation repeats as well; not if their `worker_init_fn` is a `SeededOnce`.

    If the number of ranks or the batch size has changed, the ranks resume after the same samples of
    the epoch's order: the rest is resharded.

    A subclass of DataLoader with an `__iter__` of its own may yield more or fewer batches than it
    reads. Its earlier batches are read again, in the same order, and skipped.

    Args:
        loader, name, rank, shard: as for `Resumable`.
    """

    def __init__(
        self, loader: DataLoader[Any], name: str, rank: int, shard: tuple[int, int]
    ) -> None:
        super().__init__(loader, name, rank, shard)
        has_workers = loader.num_workers > 0
        seeds_batches = has_workers and not isinstance(loader.worker_init_fn, rng.SeededOnce)
        is_batched = loader.batch_sampler is not None
        self.inexact = _inexact_reason(loader, name) if has_workers else ""
        find_generators = rng.generators_of_loader if has_workers else rng.generators_of_data
        self._generators = find_generators(loader)
        self._order = order_of(loader, shard[1])
        self._skips_indices = yields_what_it_reads(loader)
        self._user_loader = loader
        self._sampler = ResumableSampler(
            loader.batch_sampler if is_batched else loader.sampler,
            self._generators,
            is_batched=is_batched,
            first_seed=rank * 15_485_863 if seeds_batches else None,
        )
        dataset = _SeededDataset(loader.dataset) if seeds_batches else loader.dataset
        source = "batch_sampler" if is_batched else "sampler"
        self.loader = copy_loader(loader, dataset=dataset, **{source: self._sampler})
        self._reshard: Reshard | None = None
        """Where the current epoch was resharded."""
        self._resumed: _Resumed | None = None
        self._had_workers = False
        """Whether the resumed run had already started persistent workers."""

    def end_of_epoch(self) -> tuple[int, int, int] | None:
        """Return numbers of samples; see `Resumable`."""
        if self._order.kind not in ("sharded", "distributed"):
            return None
        (index, count), sampler = self._shard, self._order.sampler
        is_distributed = self._order.kind == "distributed"
        if is_distributed and (sampler.drop_last or sampler.num_replicas != count):
            return None
        total = len(sampler.dataset if is_distributed else sampler)
        total -= 0 if self._reshard is None else self._reshard.samples
        even = self._reshard is not None or getattr(sampler_of(self._user_loader), "even", True)
        own = -(-total // count) if even else len(range(index, total, count))
        repeated = int(even and 0 < total % count <= index)
        last = own % self.batch_size
        if not last or not getattr(self._user_loader, "drop_last", False):
            return own, last or self.batch_size, repeated
        return own - last, self.batch_size, 0

    # -- an epoch

    def begin(self, epoch: int, done: int, length: float = math.inf) -> Begun:
        """Return an iterator after the first `done` batches; see `Resumable`."""
        resumed, self._resumed = self._resumed, None
        self.left, self._reshard = math.inf, None
        if resumed is None:
            start = None
            if self._had_workers:
                # Starting workers again draws a number that the resumed run has not drawn here.
                start = {**rng.rng_state(), "generators": rng.generator_states(self._generators)}
                self._had_workers = False
            self._sampler.begin(epoch, done, start)
            return iter(self.loader), []
        # A state without a rule was shuffled by torch.
        rule = resumed.state.get("rule") or TORCH
        rule = rule if rule in RULES else None
        drawn: list[int | None] = []
        if resumed.reshard is None:
            skip = done if self._skips_indices else 0
            self._sampler.begin(epoch, skip, resumed.state.get("start"), rule)
        else:
            drawn = self._begin_resharded(epoch, done, resumed, resumed.reshard, rule)
        batches = iter(self.loader)
        # Only now, since a loader draws its own number before it reads the first index.
        self._sampler.draw.prime()
        if resumed.first not in (None, *(drawn or [self._sampler.draw.first])):
            self._warn(
                f"the samples of {self._name} do not come in the order that they had when the "
                "checkpoint was saved, so that some of this epoch may be read twice and others not "
                f"at all: its sampler ({type(sampler_of(self._user_loader)).__name__}) draws from "
                "what is not in the checkpoint, or the data have changed"
            )
        last: list[Any] = []
        if not self._skips_indices:
            for batch in islice(batches, done):
                last = [batch]
        rng.set_generator_states(self._generators, resumed.generators)
        return batches, last

    def _begin_resharded(
        self, epoch: int, done: int, resumed: _Resumed, reshard: Reshard, rule: str | None
    ) -> list[int | None]:
        """Let the sampler yield this rank's part of the rest.

        Return the checksums of the first batch of the rank that saved, as a batch and as one
        sample; [] if the epoch was resharded before.
        """
        start, saved = resumed.state["start"], resumed.saved
        order = self._order.draw(reshard.seed, epoch, start, self._generators, rule)
        indices = self._part_of(order[reshard.samples :])
        skip = done - reshard.batches
        self._reshard, self.left = reshard, len(indices) - skip
        self._sampler.begin(epoch, skip, start, rule, indices, reshard.samples)
        if saved is None:
            return []
        part = order[saved.start :].shard(saved.shard, saved.shards, even=True)
        first = part[: saved.batch_size].tolist()
        return [checksum([first]), checksum(first)]

    def _part_of(self, rest: IndexSequence) -> Any:
        """Return the indices, or batches of indices, of this rank in the rest of an order."""
        index, count = self._shard
        if getattr(sampler_of(self._user_loader), "drop_last", False):  # DistributedSampler's
            rest = rest[: len(rest) // count * count]
        part = rest.shard(index, count, even=True)
        own: Any = self._user_loader.batch_sampler
        return part if own is None else BatchSampler(part, own.batch_size, own.drop_last)

    def skip_rest(self) -> None:
        """Skip the rest of the resumed epoch; see `Resumable`."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            rng.set_generator_states(self._generators, resumed.generators)

    def close(self) -> None:
        """End persistent workers, after the last iteration."""
        # Release them here, in order: under the garbage collector, each takes 5 s to end.
        self.loader.__dict__["_iterator"] = None

    # -- resuming

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Load the states of all ranks; see `Resumable`."""
        first, own = self._read_states(states)
        if first.get("order") == self._order.kind and first.get("seed") is not None:
            # Instead of this run's own seed.
            sampler_of(self._user_loader).seed = first["seed"]
        if batches == 0:
            if own is not None:
                rng.set_generator_states(self._generators, own.get("generators", ()))
                self._had_workers = own.get("had_workers", False)
            return 0
        saved = SavedPosition.from_state(first, batches, len(states))
        shards, kind = self._shard[1], self._order.kind
        layout = {"shards": shards, "batch_size": self.batch_size, "order": kind}
        keeps_part = own is not None and all(own.get(key) == layout[key] for key in layout)
        reason = "" if keeps_part else self._why_not_resharded(first)
        changed = self._changed_order(first, saved.samples)
        if changed or (not reason and (changed := self._changed_kind(first))):
            self._warn(changed)
        generators = () if own is None else own.get("generators", ())
        if own is not None and keeps_part:
            first_batch = None if changed else own.get("first")
            self._resumed = _Resumed(own, generators, first_batch, Reshard.from_state(own))
            return batches
        converted = self._convert(saved)
        if reason:
            self._warn_of_overlap(saved, reason)
        else:
            reshard = Reshard(saved.seed, saved.samples, converted)
            first_batch = None if changed else first.get("first")
            self._resumed = _Resumed(first, generators, first_batch, reshard, saved)
        return converted

    def _why_not_resharded(self, first: dict[str, Any]) -> str:
        if not self._skips_indices:
            return f"{type(self._user_loader).__name__}.__iter__ makes the batches"
        if self._order.unknown:
            return self._order.unknown
        if (first.get("order") == "distributed") is not (self._order.kind == "distributed"):
            return "they were divided by another sampler"
        is_known = first.get("order") and first.get("start")
        return "" if is_known else "the order in which they were read is not known"

    def _changed_order(self, first: dict[str, Any], read: int) -> str:
        """Return a warning if the epoch's order certainly differs from the saved one, or "".

        Args:
            first: the state of the first rank that saved.
            read: the number of samples of the epoch that all ranks had read.
        """
        length, now = first.get("length"), self._length()
        if length is not None and now is not None and length != now:
            follows = OVERLAP
            if now < read:
                follows = f"fewer than the {read} that were read: nothing of this epoch is left"
            return (
                f"the checkpoint was saved in the middle of an epoch, with {length} samples in the "
                f"dataset of {self._name}, and now there are {now}: {follows}. Resume with the "
                "dataset that it was saved with, or from a checkpoint of the end of an epoch"
            )
        if first.get("rule", TORCH) not in (None, *RULES):
            return (
                f"the order of {self._name} was drawn by {first['rule']!r} when the checkpoint was "
                f"saved, in the middle of an epoch, and this version of Stratagem knows "
                f"{', '.join(map(repr, RULES))}: {OVERLAP}. Resume with the version that saved "
                "it, or from a checkpoint of the end of an epoch"
            )
        return ""

    def _changed_kind(self, first: dict[str, Any]) -> str:
        """Return a warning if a sampler or the dataset has another type than before, or ""."""
        before = first.get("kinds", {})
        for what, kind in self._kinds().items():
            if before.get(what, kind) != kind:
                return (
                    f"the checkpoint was saved in the middle of an epoch, when the {what} of "
                    f"{self._name} was a {format_value(before[what])}, and now it is a {kind!r}: "
                    f"{OVERLAP}. Resume with what it was saved with, or from a checkpoint of the "
                    "end of an epoch"
                )
        return ""

    def _length(self) -> int | None:
        """Return the number of samples in the dataset; None if unknown."""
        length = length_of(self._user_loader.dataset)
        return None if length == math.inf else int(length)

    def _kinds(self) -> dict[str, str]:
        """Return the types of the dataset and the samplers, which determine the batches."""
        loader = self._user_loader
        # Compare with None: a sampler without `__len__` has no truth value.
        batches = BatchSampler if loader.batch_sampler is None else type(loader.batch_sampler)
        return {
            "dataset": type(loader.dataset).__name__,
            "batch sampler": batches.__name__,
            "sampler": type(innermost(sampler_of(loader))).__name__,
        }

    # -- saving

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`; see `Resumable`."""
        state = super().state(within_epoch=within_epoch)
        shares_seed = self._order.kind in ("sharded", "distributed")
        state["had_workers"] = has_persistent_workers(self.loader)
        state["order"] = self._order.kind
        state["seed"] = int(sampler_of(self._user_loader).seed) if shares_seed else None
        state["first"] = self._sampler.draw.first
        state["rule"] = self._sampler.draw.rule
        state["length"] = self._length()
        state["kinds"] = self._kinds()
        state["generators"] = rng.generator_states(self._generators)
        state[Reshard.KEY] = None if self._reshard is None else asdict(self._reshard)
        if self._sampler.draw.start is not None:
            state["start"] = self._sampler.draw.start
        return state

    def _warn_if_inexact(self) -> None:
        if self._sampler.draw.start is None:
            return  # no batch was read yet
        if not self.inexact and (reason := self._sampler.draw.why_not_drawn_again()):
            self.inexact = f"the sampler of {self._name} {reason}"
        super()._warn_if_inexact()


def _inexact_reason(loader: DataLoader[Any], name: str) -> str:
    """Return why a loader with workers cannot resume exactly; "" if it can."""
    if not getattr(loader, "in_order", True):
        return f"{name} has in_order=False, so its batches come in any order"
    if held_by_data := rng.generators_held_by_data(loader):
        return (
            f"the dataset of {name} holds a {type(held_by_data[0]).__name__}, of which "
            "each worker has a copy whose state is not known: draw from random, numpy.random "
            "or torch instead, which are seeded for each batch, or pass num_workers=0"
        )
    return ""


class _SeededDataset:
    """A dataset in a worker that seeds the RNGs with the batch's seed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, seed_and_indices: list[Any]) -> Any:
        seed, *indices = seed_and_indices
        rng.seed_host(seed)
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]

    def __getitem__(self, seed_and_index: tuple[int, Any]) -> Any:
        rng.seed_host(seed_and_index[0])
        return self._dataset[seed_and_index[1]]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)  # for example during the pickling for a worker
        return getattr(self._dataset, name)
