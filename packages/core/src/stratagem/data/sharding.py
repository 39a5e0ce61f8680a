"""Data loaders for several ranks: each rank reads its own part, and no sample is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stratagem.data.index_sequence import IndexSequence, draw_all
from stratagem.errors import UserCodeError
from stratagem.rng import (
    SeededOnce,
    WorkerSeed,
    chosen_seed,
    preserve_rng_state,
    seed_host,
    seeds_workers,
)

UNKNOWN = float("inf")
"""The length of a loader without a known length."""


class ShardedSampler(Sampler[Any]):
    """The part of a sampler's indices that a rank reads: every `count`-th index.

    All ranks must draw the same order, so a random sampler draws with a seed that the ranks share.
    The seed changes with the epoch.

    Args:
        sampler: the loader's own sampler.
        index, count: the number of the part, and the number of parts.
        even: whether to repeat the first indices until every rank has the same number (for
            training, where ranks must run the same number of steps). Otherwise each index is read
            once.
        seed: the seed that all ranks share.
    """

    def __init__(
        self, sampler: Sampler[Any], index: int, count: int, *, even: bool, seed: int
    ) -> None:
        self.sampler = sampler
        self.index = index
        self.count = count
        self.even = even
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order from the next iteration on."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    @property
    def total(self) -> int:
        """The number of indices that all ranks read together."""
        return len(self.sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self.even:
            return math.ceil(self.total / self.count)
        return len(range(self.index, self.total, self.count))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part())

    def part(self, rule: str | None = None) -> IndexSequence:
        """Draw the order, and return this rank's part; for `rule` see `order`."""
        return self.order(rule).shard(self.index, self.count, even=self.even)

    def order(self, rule: str | None = None) -> IndexSequence:
        """Draw the indices of all ranks, in their order before sharding.

        Args:
            rule: the shuffling rule; None selects `index_sequence.rule_of`.
        """
        generator = getattr(self.sampler, "generator", None)
        seed = (self.seed + self.epoch) % 2**63
        with preserve_rng_state():
            seed_host(seed)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            return draw_all(self.sampler, rule)


class EqualBatches(BatchSampler):
    """Batches of an evaluation, of one size on all ranks that have a batch in the same step.

    A collective of a step then receives tensors of one shape. After the full batches of all ranks,
    each rank has one smaller batch with an equal part of the remaining samples. If fewer samples
    than ranks are left then, the first ranks have one more batch of a single sample.

    Args:
        sampler: the rank's part of the samples, each of which one rank reads.
        batch_size: the number of samples in a full batch.

    Example:
        >>> parts = [ShardedSampler(range(7), rank, 2, even=False, seed=0) for rank in range(2)]
        >>> [list(EqualBatches(part, 2)) for part in parts]
        [[[0, 2], [4], [6]], [[1, 3], [5]]]
    """

    sampler: ShardedSampler

    def __init__(self, sampler: ShardedSampler, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def _sizes(self) -> list[int]:
        part, own = self.sampler, len(self.sampler)
        full, rest = divmod(part.total, part.count * self.batch_size)
        sizes = [self.batch_size] * full + [rest // part.count] * (rest >= part.count)
        return sizes + [1] * (own - sum(sizes))

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[list[Any]]:
        indices = iter(self.sampler)
        return (list(islice(indices, size)) for size in self._sizes())


def shard_loader(
    loader: Any, index: int, count: int, *, even: bool, name: str = "the data loader"
) -> Any:
    """Return a loader that reads one rank's part of the data.

    The user's DataLoader is copied with another sampler, and keeps its class, workers and collate
    function. A loader that cannot be sharded (with an IterableDataset, or not a DataLoader) or that
    shards the data itself (its sampler has `num_replicas`) is returned unchanged. A loader that is
    not a DataLoader, with `read_part(index, count)`, returns the loader of the part by itself.

    Args:
        loader: the user's loader.
        index, count: the number of the part, and the number of parts.
        even: see `ShardedSampler`.
        name: the name of the loader in errors.

    Raises:
        UserCodeError: the loader has a custom batch sampler, which cannot be sharded safely.
    """
    if not isinstance(loader, DataLoader):
        return loader.read_part(index, count) if hasattr(loader, "read_part") else loader
    is_seeded = isinstance(loader.worker_init_fn, (SeededOnce, WorkerSeed))
    if seeds_workers() and loader.num_workers and not is_seeded:
        loader = copy.copy(loader)
        loader.worker_init_fn = WorkerSeed(index, loader.worker_init_fn)
    if count == 1 or isinstance(loader.dataset, IterableDataset):
        return loader
    batch_sampler = loader.batch_sampler
    if divides_data(loader):
        return loader
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        raise UserCodeError(
            f"{name} has a batch sampler of its own ({type(batch_sampler).__name__}), which cannot "
            "be divided between ranks: let it yield this rank's batches only and give it the "
            "attribute num_replicas, or pass use_distributed_sampler=False"
        )
    sampler = ShardedSampler(sampler_of(loader), index, count, even=even, seed=chosen_seed())
    return with_sampler(loader, sampler)


def with_equal_batches(loader: Any) -> Any:
    """Return a loader of an evaluation with `EqualBatches`, if its samples are divided uneven."""
    batches = getattr(loader, "batch_sampler", None)
    part: Any = getattr(batches, "sampler", None)
    is_uneven = isinstance(part, ShardedSampler) and not part.even and part.count > 1
    if type(batches) is not BatchSampler or batches.drop_last or not is_uneven:
        return loader
    return copy_loader(loader, batch_sampler=EqualBatches(part, batches.batch_size))


def in_order(source: Any) -> Any:
    """Return a loader, or loaders in a list or a dict, without shuffling.

    A DataLoader is copied with a SequentialSampler, unless it already has one. A custom batch
    sampler is kept with its order.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> list(in_order(DataLoader([3, 1, 2], shuffle=True, batch_size=3)))
        [tensor([3, 1, 2])]
    """
    if isinstance(source, Mapping):
        return {name: in_order(one) for name, one in source.items()}
    if isinstance(source, (list, tuple)):
        return [in_order(one) for one in source]
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return source
    is_torchs = source.batch_sampler is None or type(source.batch_sampler) is BatchSampler
    if not is_torchs or isinstance(sampler_of(source), SequentialSampler):
        return source
    sampler: Sampler[int] = SequentialSampler(source.dataset)  # type: ignore[arg-type]
    return with_sampler(source, sampler)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that chooses a loader's samples.

    A loader with a torch batch sampler also has a SequentialSampler, which it does not use.

    Example:
        >>> from torch.utils.data import BatchSampler, DataLoader
        >>> sampler_of(DataLoader([3, 1, 2], batch_sampler=BatchSampler([2, 0], 1, False)))
        [2, 0]
    """
    batches: Any = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """Return a copy of a loader with another sampler.

    The loader must have torch's own batch sampler, or no batch sampler.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> list(with_sampler(DataLoader([3, 1, 2], batch_size=2), [2, 0]))
        [tensor([2, 3])]
    """
    own = batches = loader.batch_sampler
    if type(own) is BatchSampler:
        batches = BatchSampler(sampler, own.batch_size, own.drop_last)
    return copy_loader(loader, sampler=sampler, batch_sampler=batches)


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other attributes, and with workers of its own."""
    # DataLoader forbids assignments to these attributes after __init__; a copy avoids guessing the
    # arguments of a subclass's constructor.
    copied = copy.copy(loader)
    copied.__dict__.update(attributes, _iterator=None)
    return copied


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a loader's batch; None if it is unknown."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def divides_data(loader: Any) -> bool:
    """Return whether a loader's sampler shards the data itself, as DistributedSampler does."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    chooses = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    samplers = (getattr(loader, "sampler", None), batch_sampler, chooses)
    return any(isinstance(s, ShardedSampler) or hasattr(s, "num_replicas") for s in samplers)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` once of each sampler of a loader that has this method."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    wrappers = [one for one in samplers if getattr(type(one), "passes_epoch_on", False)]
    # A loader with automatic batching has the same sampler in two places.
    for sampler in {id(one): one for one in wrappers or samplers}.values():
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def has_persistent_workers(loader: Any) -> bool:
    """Return whether a loader has started persistent workers."""
    persistent = getattr(loader, "persistent_workers", False)
    return persistent and getattr(loader, "_iterator", None) is not None


def is_iterable(loader: Any) -> bool:
    """Return whether a loader reads an IterableDataset, which may only estimate its length."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def is_iterated_by_torch(loader: Any) -> bool:
    """Return whether torch's methods iterate over a loader of a map-style dataset, and count it."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__


def yields_what_it_reads(loader: DataLoader[Any]) -> bool:
    """Return whether a loader yields a batch for each batch of indices.

    An `__iter__` of user code may repeat batches, or leave some out.
    """
    module = getattr(type(loader).__iter__, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "torchdata")


def knows_length(loader: Any) -> bool:
    """Return whether a loader's length surely is its number of batches.

    User code computes other lengths, which may be estimates.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> knows_length(DataLoader([1, 2, 3])), knows_length(iter([1, 2, 3]))
        (True, False)
    """
    if type(loader) in (list, tuple, range):
        return True
    if not is_iterated_by_torch(loader):
        return False
    batches: Any = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, ShardedSampler):
        sampler = sampler.sampler
    is_torchs = type(batches) in (BatchSampler, EqualBatches, type(None))
    return is_torchs and type(sampler) in _COUNTED


TORCH_SAMPLERS: tuple[type, ...] = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers that draw the same in each process, an epoch's indices at once or from a generator."""

_COUNTED = (*TORCH_SAMPLERS, list, tuple, range)
"""Samplers that yield as many indices as their length says."""


def length_of(loader: Any) -> float:
    """Return a loader's number of batches; infinity if it has no length."""
    try:
        return float(len(loader))
    except (TypeError, NotImplementedError):
        return UNKNOWN


class _Reading(Iterator[Any]):
    """Reads an iterator without another call of its `__iter__`, which may begin anew."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)


def iterator_of(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader, whose `__iter__` is called exactly once.

    Python calls it again for a loader that is its own iterator, in each `for` and `islice`.

    Example:
        >>> class Loader:
        ...     def __iter__(self):
        ...         print("begins")
        ...         self.left = 2
        ...         return self
        ...     def __next__(self):
        ...         if not self.left:
        ...             raise StopIteration
        ...         self.left -= 1
        ...         return self.left
        >>> list(iterator_of(Loader()))
        begins
        [1, 0]
    """
    batches = iter(loader)
    return _Reading(batches) if batches is loader else batches
