"""Resumable loaders: their base class, and those that skip batches or have a state of their own."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from stratagem import rng
from stratagem.checkpoint.forms import Count, Nothing, Positive, require_form
from stratagem.data.resume.resumable_sampler import has_exact_length
from stratagem.data.sharding import batch_size_of, iterator_of, length_of


@dataclass(frozen=True)
class Reshard:
    """Where an epoch was resharded; a saved state has it under `KEY`.

    Attributes:
        seed: the seed of the epoch's order; None if the order was drawn by one reader.
        samples: the number of samples of the order that were read before.
        batches: the same in batches of each new rank, rounded down.
    """

    KEY: ClassVar = "deal"  # the name in checkpoints, older than that of the class

    seed: int | None
    samples: int
    batches: int

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reshard | None:
        """Return the reshard of the epoch in which a state was saved; None without a reshard."""
        return cls(**state[cls.KEY]) if state.get(cls.KEY) else None


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
    f"{Reshard.KEY}?": (Nothing, {"seed": (Nothing, int), "samples": Count, "batches": Count}),
    "start?": {"python": list, "torch": object, "generators": list},
    "own?": object,
    "before_last?": object,
    "ended?": bool,
    "begun?": list,
}

Begun = tuple[Iterator[Any], list[Any]]
"""The batches that are left of an epoch, and the last batch before them, if it was read."""

OVERLAP = "some samples of this epoch may be read twice and others not at all"


@dataclass(frozen=True)
class SavedPosition:
    """The position of the ranks that saved, in the order of an epoch's samples.

    Attributes:
        seed: the seed of the order; None if the order was drawn by one reader.
        start: the number of samples before the first sample of these ranks.
        samples: the number of samples before the next one.
        shard: the number of the first rank's part.
        shards: the number of parts.
        batch_size: the number of samples in a batch.
    """

    seed: int | None
    start: int
    samples: int
    shard: int
    shards: int
    batch_size: int

    @classmethod
    def from_state(cls, first: dict[str, Any], batches: int, ranks: int) -> SavedPosition:
        """Return the position of ranks.

        Args:
            first: the state of the first rank that saved.
            batches: the number of batches that each rank had yielded in the epoch.
            ranks: the number of ranks that saved.
        """
        reshard = Reshard.from_state(first) or Reshard(first.get("seed"), 0, 0)
        shards, batch_size = first.get("shards", ranks), first.get("batch_size", 1)
        samples = reshard.samples + (batches - reshard.batches) * batch_size * shards
        shard = first.get("shard", 0)
        return cls(reshard.seed, reshard.samples, samples, shard, shards, batch_size)


class Resumable(ABC):
    """Iterates over a loader from any batch of an epoch on.

    `make_resumable` chooses the class: `IndexedLoader`, `StatefulLoader` or `SkippingLoader`.

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

    def __init__(self, loader: Any, name: str, rank: int, shard: tuple[int, int]) -> None:
        self.loader = loader
        self.inexact = ""
        self.left = math.inf
        self.has_exact_length = has_exact_length(loader)
        self._name = name
        self._rank = rank
        self._shard = shard
        self._generators: list[Any] = []
        """The generators that the data are drawn with, besides the global RNGs."""
        self._warned = False

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch; 1 if unknown."""
        size = batch_size_of(self.loader)
        return 1 if size is None else size

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
        return None

    @abstractmethod
    def begin(self, epoch: int, done: int, length: float = math.inf) -> Begun:
        """Return an iterator over an epoch's batches after the first `done`, and the last before.

        The last batch before is returned, in a list, only if it was read.

        Args:
            epoch: the number of the epoch.
            done: the number of batches to skip.
            length: the number of batches of the epoch; infinity if unknown.
        """

    @abstractmethod
    def skip_rest(self) -> None:
        """Skip the rest of the resumed epoch, because this loader was at its end."""

    @abstractmethod
    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Load the states of all ranks; the next `begin` resumes from them.

        Args:
            states: the return values of `state`, in the order of the ranks that saved.
            batches: the number of batches that each of these ranks had yielded in the epoch; 0 at
                its start.

        Returns:
            The same position as a number of this loader's batches.
        """

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
        return {"shard": index, "shards": count, "batch_size": self.batch_size}

    def close(self) -> None:
        """End persistent workers, after the last iteration; by default there are none."""

    # -- shared by the classes

    def _read_states(
        self, states: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the state of the first rank, and the state of this rank's part or None.

        Raises:
            CheckpointMismatchError: if a state has another form, or RNG states cannot be restored.
        """
        checked = partial(require_form, form=_FORM, name=f"position in {self._name}")
        first = checked(states[0])
        # This rank's state first, since each state is decoded on access.
        tried = map(checked, chain(states[self._rank : self._rank + 1], states))
        own = next((s for s in tried if s.get("shard", 0) == self._shard[0]), None)
        saved = own or first
        start = saved.get("start") or rng.rng_state()
        for generators in (start.get("generators"), saved.get("generators"), saved.get("begun")):
            rng.try_rng_state(start, self._generators, generators or ())
        return first, own

    def _convert(self, saved: SavedPosition) -> int:
        """Return a position as a number of this loader's batches, rounded down."""
        return saved.samples // (self.batch_size * self._shard[1])

    def _warn_of_overlap(self, saved: SavedPosition, reason: str) -> None:
        self._warn(
            f"the checkpoint was saved in the middle of an epoch, by {saved.shards} reader(s) of "
            f"{self._name} with batches of {saved.batch_size}, and now there are {self._shard[1]} "
            f"with batches of {self.batch_size}: {OVERLAP}, since {reason}"
        )

    def _warn_if_inexact(self) -> None:
        self._warned = True
        if self.inexact:
            self._warn(
                "a run that resumes from this checkpoint in the middle of an epoch may differ: "
                + self.inexact
            )

    def _warn(self, message: str) -> None:
        if self._rank == 0:
            warnings.warn(message, stacklevel=3)


class SkippingLoader(Resumable):
    """A loader whose earlier batches are read again and skipped.

    Args:
        loader, name, rank, shard: as for `Resumable`.
    """

    def __init__(self, loader: Any, name: str, rank: int, shard: tuple[int, int]) -> None:
        super().__init__(loader, name, rank, shard)
        self.inexact = _inexact_reason(loader, name)
        if not getattr(loader, "num_workers", 0):
            self._generators = rng.generators_of_data(loader)
        self._start: list[Any] = []
        """The generators' states at the start of the epoch."""
        self._resumed: dict[str, Any] = {}
        """The state that the next `begin` restores."""

    def begin(self, epoch: int, done: int, length: float = math.inf) -> Begun:
        """Return an iterator after the first `done` batches, and the last one; see `Resumable`."""
        resumed, self._resumed = self._resumed, {}
        begun = self._begin(resumed, done, length)
        rng.set_generator_states(self._generators, resumed.get("generators", ()))
        return begun

    def _begin(self, resumed: dict[str, Any], done: int, length: float) -> Begun:
        if 0 < length <= done:
            return iter(()), []
        rng.set_generator_states(self._generators, resumed.get("begun", ()))
        self._start = rng.generator_states(self._generators)
        batches = self._iterate(length)
        last: list[Any] = []
        for batch in islice(batches, done):
            last = [batch]
        return batches, last

    def _iterate(self, left: float) -> Iterator[Any]:
        """Return an iterator over the loader; the epoch ends after `left` batches."""
        return iterator_of(self.loader)

    def skip_rest(self) -> None:
        """Skip the rest of the resumed epoch; see `Resumable`."""
        resumed, self._resumed = self._resumed, {}
        rng.set_generator_states(self._generators, resumed.get("generators", ()))

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Load the states of all ranks; see `Resumable`."""
        first, own = self._read_states(states)
        if batches == 0:
            self._resume_at_start(own or {})
            return 0
        size = self.batch_size
        # A state of the loader's own is right for any batch size.
        keeps_size = own is not None and ("own" in own or own.get("batch_size", size) == size)
        if own is not None and keeps_size and own.get("shards") == self._shard[1]:
            self._resumed = own
            return batches
        saved = SavedPosition.from_state(first, batches, len(states))
        self._warn_of_overlap(saved, f"which samples a rank reads is up to {self._name}")
        return self._convert(saved)

    def _resume_at_start(self, own: dict[str, Any]) -> None:
        """Restore the state of this rank's part between two epochs."""
        rng.set_generator_states(self._generators, own.get("generators", ()))

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`; see `Resumable`."""
        state = super().state(within_epoch=within_epoch)
        if self._generators:
            state["generators"] = rng.generator_states(self._generators)
            state["begun"] = self._start
        return state


class StatefulLoader(SkippingLoader):
    """A loader that resumes from its own state; batches are skipped if the checkpoint has none.

    The state of a loader with `read_part` is a position in the data of all ranks: any number of
    ranks resumes from it.

    Args:
        loader, name, rank, shard: as for `Resumable`.
        stateful: the object with `state_dict` and `load_state_dict`: the loader or its dataset.
    """

    def __init__(
        self, loader: Any, name: str, rank: int, shard: tuple[int, int], stateful: Any
    ) -> None:
        super().__init__(loader, name, rank, shard)
        self.inexact = ""
        self._stateful = stateful
        self._fetcher: Any = None
        """The part of a DataLoader's iterator whose `ended` says that the data have ended."""
        self._before_last: Any = None
        """The state before the last batch of an epoch that ends before the data do."""

    def resume(self, states: Sequence[dict[str, Any]], batches: int) -> int:
        """Load the states of all ranks; see `Resumable`."""
        first, _ = self._read_states(states)
        if "own" not in first or not hasattr(self.loader, "read_part"):
            return super().resume(states, batches)
        self._resumed = {"own": first["own"]}
        self._stateful.load_state_dict(first["own"])  # for the next epoch, if this one is over
        return self._convert(SavedPosition.from_state(first, batches, len(states)))

    def _begin(self, resumed: dict[str, Any], done: int, length: float) -> Begun:
        if 0 < length <= done:
            # At the end of an epoch, the state would belong to an iteration that never begins.
            self._read_last_again(resumed)
            return self._end(), []
        limit = length if length < length_of(self.loader) else math.inf
        if "own" not in resumed:
            return super()._begin(resumed, done, limit)
        self._stateful.load_state_dict(resumed["own"])
        if not resumed.get("ended"):
            return self._iterate(limit - done, resumed["own"]), []
        # The last batch was short. A loader that had yet to notice its end does so now.
        if next(iter(self.loader), None) is not None:
            self._stateful.load_state_dict(resumed["own"])  # the next epoch has begun
        return self._end(), []

    def _end(self) -> Iterator[Any]:
        self._fetcher = SimpleNamespace(ended=True)
        return iter(())

    def _iterate(self, left: float, loaded: Any = None) -> Iterator[Any]:
        batches = iterator_of(self.loader)
        # A DataLoader without workers has one. The iterator itself is not kept.
        self._fetcher = getattr(batches, "_dataset_fetcher", None)
        self._before_last = None
        return batches if left == math.inf else self._note_before_last(batches, int(left), loaded)

    def _note_before_last(self, batches: Iterator[Any], left: int, loaded: Any) -> Iterator[Any]:
        yield from islice(batches, left - 1)
        # Before its first batch, the loader may not have applied its loaded state.
        use_loaded = left == 1 and loaded is not None
        self._before_last = loaded if use_loaded else self._stateful.state_dict()
        yield from batches
        self._before_last = None  # the data have ended, too

    def _resume_at_start(self, own: dict[str, Any]) -> None:
        self._read_last_again(own)
        super()._resume_at_start(own)

    def _read_last_again(self, own: dict[str, Any]) -> None:
        """Restore the position after an epoch's last batch, by reading this batch again."""
        if "before_last" not in own:
            return
        if own.get("shards") == self._shard[1]:
            with rng.preserve_rng_state():
                self._stateful.load_state_dict(own["before_last"])
                next(iter(self.loader), None)
            self._before_last = own["before_last"]
        else:
            self._warn(
                f"the checkpoint has positions of {own.get('shards')} reader(s) of {self._name}, "
                f"and now there are {self._shard[1]}: each begins at the beginning. Resume with as "
                "many as before to go on where they were"
            )

    def state(self, *, within_epoch: bool = True) -> dict[str, Any]:
        """Return this rank's state for `resume`; see `Resumable`."""
        state = super().state(within_epoch=within_epoch)
        state["own"] = self._stateful.state_dict()
        state["ended"] = bool(getattr(self._fetcher, "ended", False))
        if self._before_last is not None:
            state["before_last"] = self._before_last
        return state


def has_state(thing: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _inexact_reason(loader: Any, name: str) -> str:
    if isinstance(loader, (list, tuple)):
        return ""  # it yields the same in each process
    if not isinstance(loader, DataLoader):
        return (
            f"{name} is a {type(loader).__name__}, of which the batches before are read and "
            "passed over: they are right if it yields the same ones in each process"
        )
    in_workers = "; its state_dict is in the workers" if has_state(loader.dataset) else ""
    return (
        f"the dataset of {name} is an IterableDataset, of which the batches before are "
        "read and passed over: they are right if it yields the same ones in each process"
        f"{in_workers}. An IterableDataset that has state_dict and load_state_dict goes on "
        "by its own state with num_workers=0; so does a loader that has them, such as "
        "torchdata's StatefulDataLoader"
    )
