"""A data loader that goes on in the middle of an epoch, with the samples that are still to come."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from stratagem.data import ShardedSampler
from stratagem.random_state import random_state, set_random_state


class Resumable:
    """Iterates over a loader from any batch of an epoch on.

    The user's DataLoader is kept; what it takes its indices from is wrapped, so that the batches
    before are passed over without being read. A sampler that draws from the global random numbers
    draws again what it drew: their state at its start is kept (`start`). Workers are seeded for
    each batch, by the state at the start of the epoch and the batch's number, so that random
    augmentation repeats as well.

    A loader that has `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) is left to
    itself. Of others (an IterableDataset, any other iterable) batches are read and passed over.

    Args:
        loader: of this rank.
        name: stands for it in messages.
        rank: whose; workers of different ranks get different seeds.

    Attributes:
        loader: what is iterated over; the user's loader, or a copy of it with wrapped indices.
        start: the state of the random numbers when the present epoch's indices were drawn.
        inexact: why a resumed run differs from one that was not interrupted; "" if it does not.
    """

    def __init__(self, loader: Any, name: str, rank: int = 0) -> None:
        self.loader = loader
        self.start: dict[str, Any] | None = None
        self._rank = rank
        self._generators = _generators_of(loader)
        self.inexact = ""
        self._indices: _Indices | None = None
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if self._has_state:
            return
        if isinstance(loader, (list, tuple)):
            return  # it yields the same in each process
        if not isinstance(loader, DataLoader):
            self.inexact = (
                f"{name} is a {type(loader).__name__}, of which the batches before are read and "
                "passed over: they are right if it yields the same ones in each process"
            )
        elif isinstance(loader.dataset, IterableDataset):
            self.inexact = (
                f"the dataset of {name} is an IterableDataset, of which the batches before are "
                "read and passed over: they are right if it yields the same ones in each process. "
                "A loader with state_dict and load_state_dict, such as torchdata's "
                "StatefulDataLoader, goes on by its own state"
            )
        else:
            self._wrap(loader)
            if loader.num_workers and not getattr(loader, "in_order", True):
                self.inexact = f"{name} has in_order=False, so its batches come in any order"

    def _wrap(self, loader: DataLoader[Any]) -> None:
        is_batched = loader.batch_sampler is not None
        inner = loader.batch_sampler if is_batched else loader.sampler
        with_workers = loader.num_workers > 0
        self._indices = _Indices(
            inner,
            self._generators,
            is_batched=is_batched,
            first_seed=self._rank * 15_485_863 if with_workers else None,
        )
        # DataLoader refuses assignments to these after __init__; a copy avoids guessing the
        # arguments of a subclass's constructor.
        wrapped = copy.copy(loader)
        wrapped.__dict__["batch_sampler" if is_batched else "sampler"] = self._indices
        wrapped.__dict__["_iterator"] = None
        if with_workers:
            wrapped.__dict__["dataset"] = _SeededDataset(loader.dataset)
        self.loader = wrapped

    @property
    def batch_size(self) -> int:
        """Samples in a batch; 1 where the loader does not say."""
        size = getattr(self.loader, "batch_size", None)
        return size if isinstance(size, int) else 1

    @property
    def is_ordered(self) -> bool:
        """Whether samples come in the order of the dataset, over all ranks."""
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, _Indices):
            sampler = sampler.sampler
        if isinstance(sampler, ShardedSampler):
            sampler = sampler.sampler
        return isinstance(sampler, SequentialSampler)

    def begin(
        self, epoch: int, done: int, saved: dict[str, Any] | None
    ) -> tuple[Iterator[Any], list[Any]]:
        """Return the batches of an epoch after the first `done`, and the last before them.

        The last one is returned only where it was read.

        Args:
            epoch: which.
            done: how many to pass over.
            saved: what `state` returned in that epoch; None: nothing was saved.
        """
        if self._has_state:
            if saved is not None and "loader" in saved:
                self.loader.load_state_dict(saved["loader"])
            return iter(self.loader), []
        if self._indices is None:
            batches = iter(self.loader)
            last: list[Any] = []
            for batch in islice(batches, done):
                last = [batch]
            return batches, last
        start = None if saved is None else saved.get("start")
        self._indices.begin(epoch, done, start)
        batches = iter(self.loader)
        # Only now: a loader draws a number of its own before it takes the first index.
        self.start = self._indices.prime()
        if saved is not None:
            _set_generators(self._generators, saved.get("generators", ()))
        return batches, []

    def state(self) -> dict[str, Any]:
        """Return what `begin` needs to go on from here in the present epoch; plain data."""
        state: dict[str, Any] = {
            "generators": [g.get_state() for g in self._generators],
            "batch_size": self.batch_size,
        }
        if self.start is not None:
            state["start"] = self.start
        if self._has_state:
            state["loader"] = self.loader.state_dict()
        return state


class _Indices:
    """What a loader takes its indices from: another sampler, of which the first are passed over."""

    def __init__(
        self,
        inner: Any,
        generators: list[torch.Generator],
        *,
        is_batched: bool,
        first_seed: int | None,
    ) -> None:
        self.sampler = inner  # so that whoever tells samplers the epoch finds it
        self._generators = generators
        self._is_batched = is_batched
        self._first_seed = first_seed
        self._epoch = 0
        self._done = 0
        self._replayed: dict[str, Any] | None = None
        self._iterator: _IndexIterator | None = None

    @property
    def batch_size(self) -> Any:
        """The batch sampler's."""
        return getattr(self.sampler, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, and the sampler that it may hold, the epoch."""
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def begin(self, epoch: int, done: int, replayed: dict[str, Any] | None) -> None:
        """Prepare for the next iteration."""
        self._epoch, self._done, self._replayed = epoch, done, replayed

    def prime(self) -> dict[str, Any]:
        """Draw the indices, if the loader has not asked for one yet; return the state before."""
        assert self._iterator is not None
        return self._iterator.prime()

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice, and uses the last.
        self._iterator = _IndexIterator(
            self.sampler, self._generators, self._done, self._replayed, self._with_seed
        )
        return self._iterator

    def _with_seed(self, key: int, number: int, indices: Any) -> Any:
        if self._first_seed is None:
            return indices
        seed = (key + self._first_seed + number * 7_919 + self._epoch * 104_729) % 2**32
        return [seed, *indices] if self._is_batched else (seed, indices)


class _IndexIterator:
    def __init__(
        self,
        sampler: Any,
        generators: list[torch.Generator],
        done: int,
        replayed: dict[str, Any] | None,
        with_seed: Callable[[int, int, Any], Any],
    ) -> None:
        self._sampler, self._generators = sampler, generators
        self._done, self._replayed = done, replayed
        self._with_seed = with_seed
        self._start: dict[str, Any] | None = None
        self._rest: Iterator[Any] = iter(())
        self._key = 0

    def prime(self) -> dict[str, Any]:
        if self._start is None:
            if self._replayed is None:
                drawn_from = [g.get_state() for g in self._generators]
                self._start = {**random_state(), "generators": drawn_from}
            else:
                self._start = self._replayed
                set_random_state(self._start)
                _set_generators(self._generators, self._start["generators"])
            self._key = zlib.crc32(bytes(self._start["torch"].tolist()))
            indices = iter(self._sampler)
            for _ in islice(indices, self._done):
                pass
            # A sampler that is a generator draws at its first index.
            self._rest = _chain_first(indices)
        return self._start

    def __iter__(self) -> _IndexIterator:
        return self

    def __next__(self) -> Any:
        self.prime()
        indices = next(self._rest)
        number, self._done = self._done, self._done + 1
        return self._with_seed(self._key, number, indices)


def _chain_first(indices: Iterator[Any]) -> Iterator[Any]:
    """Return the same, with the first one drawn now."""
    first = list(islice(indices, 1))

    def chained() -> Iterator[Any]:
        yield from first
        yield from indices

    return chained()


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler]
    samplers.append(getattr(batch_sampler, "sampler", None))
    found: list[torch.Generator] = []
    for holder in (loader, *samplers, *(getattr(s, "sampler", None) for s in samplers)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
    return found


def _set_generators(generators: list[torch.Generator], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


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
        _seed(seed_and_indices[0])
        return self._read(seed_and_indices[1:])

    def __getitem__(self, seed_and_index: tuple[int, Any]) -> Any:
        _seed(seed_and_index[0])
        return self._dataset[seed_and_index[1]]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_dataset", "_read"):
            raise AttributeError(name)  # while it is pickled to a worker, for one
        return getattr(self._dataset, name)


def _seed(seed: int) -> None:
    random.seed(seed)
    # torch.manual_seed takes 83 us, for all devices.
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
