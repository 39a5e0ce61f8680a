"""CombinedLoader: several loaders, read together or one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from stratagem.data.sharding import length_of
from stratagem.errors import ConfigurationError

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class CombinedLoader:
    """Several loaders as one, for training, validation, testing or predicting.

    A batch is a collection like `iterables`, with a batch of each loader in place of the loader. In
    mode "sequential" a batch is a batch of the current loader. Several loaders passed to a Trainer
    without a mode are read as "max_size_cycle" in training, and as "sequential" otherwise.

    Iterating yields `(batch, batch_idx, dataloader_idx)`; a Trainer passes on the batch. Each
    loader is sharded over ranks, and resumes in the middle of an epoch like a single loader.

    Args:
        iterables: loaders in a list, tuple or dict, which may be nested.
        mode: "min_size" ends with the shortest loader. "max_size" ends with the longest; loaders
            that have ended yield None. "max_size_cycle" also ends with the longest; loaders that
            have ended begin again. "sequential" reads one loader after another.

    Raises:
        ConfigurationError: the mode is unknown, or `iterables` has no loader.

    Example:
        >>> from stratagem.data import CombinedLoader
        >>> loaders = {"labelled": range(2), "unlabelled": range(10, 13)}
        >>> for batch, batch_idx, _ in CombinedLoader(loaders, "max_size_cycle"):
        ...     print(batch_idx, batch)
        0 {'labelled': 0, 'unlabelled': 10}
        1 {'labelled': 1, 'unlabelled': 11}
        2 {'labelled': 0, 'unlabelled': 12}
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise ConfigurationError(
                f"Unsupported mode {mode!r}: CombinedLoader takes {', '.join(map(repr, MODES))}"
            )
        self.iterables = iterables
        self.mode = mode
        self._flattened: list[Any] = list(_leaves(iterables))
        if not self._flattened:
            raise ConfigurationError(
                f"CombinedLoader({iterables!r}): expected at least one loader in it"
            )

    @property
    def flattened(self) -> list[Any]:
        """The loaders in their order; setting this property also replaces them in `iterables`.

        Raises:
            ConfigurationError: the property is set to another number of loaders.
        """
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ConfigurationError(
                f"Mismatch in flattened length ({len(loaders)}) and existing length "
                f"({len(self._flattened)}): CombinedLoader expects as many loaders as it has"
            )
        self.iterables = self.collect(loaders)
        self._flattened = list(loaders)

    def map(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """Return a CombinedLoader with a function applied to each loader."""
        return self.of([function(loader) for loader in self.flattened])

    def of(self, loaders: list[Any]) -> CombinedLoader:
        """Return a CombinedLoader with other loaders instead of these, in the same order."""
        return CombinedLoader(self.collect(loaders), self.mode)

    def collect(self, items: list[Any]) -> Any:
        """Return a collection like `iterables`, with each loader replaced by an item."""
        return _filled(self.iterables, iter(items))

    def __len__(self) -> int:
        total = total_of([length_of(loader) for loader in self.flattened], self.mode)
        if total == math.inf:
            raise TypeError("a loader in this CombinedLoader has no length")
        return int(total)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        # Loaders that are read together begin together, so that the workers of all loaders work.
        at_once = 1 if self.mode == "sequential" else len(self.flattened)
        return self.combine(
            [
                Reading(partial(iter, one), iter(one) if index < at_once else None)
                for index, one in enumerate(self.flattened)
            ]
        )

    def batches(self) -> Iterator[Any]:
        """Yield batches without their numbers."""
        return (batch for batch, _, _ in self)

    def combine(self, readings: list[Reading], done: int = 0) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx) from the current position of each loader.

        Args:
            readings: the position of each loader.
            done: the number of batches of the epoch before.
        """
        if self.mode != "sequential":
            together = self._together(readings, done)
            return ((batch, number, 0) for number, batch in enumerate(together))
        return self._one_by_one(readings, done)

    def _one_by_one(self, readings: list[Reading], done: int) -> Iterator[tuple[Any, int, int]]:
        for index, reading in enumerate(readings):
            number = 0
            while (item := reading.next(done)) is not END:
                yield item, number, index
                number, done = number + 1, done + 1

    def _together(self, readings: list[Reading], done: int) -> Iterator[Any]:
        while True:
            items = []
            for reading in readings:
                item = reading.next(done)
                if item is END:
                    if self.mode == "min_size" or all(one.ends for one in readings):
                        return
                    item = reading.again().next(done) if self.mode == "max_size_cycle" else None
                items.append(None if item is END else item)
            yield self.collect(items)
            del items  # before the next ones are read
            done += 1


END: Any = object()
"""Marks the end of a loader's batches."""


class Reading:
    """The state of a loader during an epoch; an iteration begins with the first `next`.

    Positions are numbers of batches of the CombinedLoader.

    Args:
        begin: a function that begins an iteration.
        iterator: the current iterator, or None before the first batch.
        starts: the positions at which iterations of the epoch have begun.
        ends: the positions at which the end of the loader was noticed.
        has_ended: whether the loader is still at its end.

    Attributes:
        starts, ends: the positions.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        iterator: Iterator[Any] | None = None,
        *,
        starts: Sequence[int] = (),
        ends: Sequence[int] = (),
        has_ended: bool = False,
    ) -> None:
        self._begin = begin
        self._iterator = iterator
        self.starts, self.ends = [*starts], [*ends]
        self._has_ended = has_ended

    def next(self, done: int) -> Any:
        """Return the next batch, or `END`; `done` is the position."""
        if self._has_ended:
            return END
        if not self.starts or self._iterator is None:
            self.starts.append(done)
        if self._iterator is None:
            self._iterator = self._begin()
        item = next(self._iterator, END)
        if item is END:
            self.ends.append(done)
            self._has_ended, self._iterator = True, None
        return item

    def again(self) -> Reading:
        """Restart the loader with the next batch."""
        self._has_ended = False
        return self


def parts_of(loader: Any) -> list[Any]:
    """Return a list of a loader, or of the loaders in a CombinedLoader."""
    return loader.flattened if isinstance(loader, CombinedLoader) else [loader]


def total_of(numbers: list[float], mode: str) -> float:
    """Return the number of batches of combined loaders; infinity if unknown.

    Example:
        >>> [total_of([2, 3], mode) for mode in MODES]
        [2, 3, 3, 5]
    """
    if mode == "sequential":
        return sum(numbers)
    return min(numbers) if mode == "min_size" else max(numbers)


def _leaves(data: Any) -> Iterator[Any]:
    if _is_collection(data):
        for one in data.values() if isinstance(data, Mapping) else data:
            yield from _leaves(one)
    else:
        yield data


def _is_collection(data: Any) -> bool:
    """Whether data contain loaders; a list of numbers or texts is a loader itself."""
    if isinstance(data, Mapping):
        return True
    return isinstance(data, (list, tuple)) and not (
        data and all(isinstance(one, (int, float, str)) for one in data)
    )


def _filled(like: Any, items: Iterator[Any]) -> Any:
    if not _is_collection(like):
        return next(items)
    if isinstance(like, Mapping):
        return {key: _filled(value, items) for key, value in like.items()}
    if hasattr(like, "_fields"):
        return type(like)(*(_filled(value, items) for value in like))
    return type(like)([_filled(value, items) for value in like])
