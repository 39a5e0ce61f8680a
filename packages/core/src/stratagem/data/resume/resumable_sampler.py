"""The order in which a rank reads an epoch's samples: drawn again, or skipped."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

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

from stratagem.data.index_sequence import IndexSequence, draw_indices, draw_rest, rule_of
from stratagem.data.sharding import ShardedSampler
from stratagem.rng import (
    generator_states,
    preserve_rng_state,
    rng_state,
    set_generator_states,
    set_rng_state,
)
from stratagem.state.safe_data import encode, find_offending_value


class ResumableSampler:
    """A wrapper of a loader's sampler that can begin at any position of an epoch.

    It stores the RNG states before the sampler draws (`start`), so that the sampler can draw the
    same order again.

    Args:
        sampler: the loader's batch sampler, or its sampler without automatic batching.
        generators: the generators that the sampler may draw from, besides the global RNGs.
        is_batched: whether the sampler yields lists of indices.
        first_seed: the seed for workers. Its sum with the batch's number is put before the indices
            of each batch. None omits this number.
    """

    passes_epoch_on = True
    """Whether `set_epoch` reaches all samplers of the loader."""

    def __init__(
        self,
        sampler: Any,
        generators: Sequence[Any],
        *,
        is_batched: bool,
        first_seed: int | None,
    ) -> None:
        self.sampler = sampler
        self.generators = generators
        self._is_batched = is_batched
        self._first_seed = first_seed
        self._epoch = 0
        self._begun: _Draw | None = None
        self._next = _Draw(self, sampler, 0, None)

    @property
    def batch_size(self) -> Any:
        """The batch sampler's."""
        return getattr(self.sampler, "batch_size", None)

    @property
    def drop_last(self) -> Any:
        """The batch sampler's."""
        return getattr(self.sampler, "drop_last", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, and of the sampler that it may contain."""
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def begin(
        self,
        epoch: int,
        done: int = 0,
        start: dict[str, Any] | None = None,
        resharded: Any = None,
        number: int = 0,
        rule: str | None = None,
    ) -> None:
        """Prepare for the next iteration.

        Args:
            epoch: the number of the epoch, which changes the workers' seeds.
            done: the number of batches to skip.
            start: the RNG states to draw from; None for the current states.
            resharded: the source of indices that replaces the sampler.
            number: the number of the first batch, for workers' seeds.
            rule: the shuffling rule; None selects `index_sequence.rule_of`.
        """
        self._epoch = epoch
        self._begun = None
        if resharded is None:
            self._next = _Draw(self, self.sampler, done, start, number, rule)
        else:
            self._next = _Draw(self, resharded, done, start, number, rule, draws=False)

    @property
    def start(self) -> dict[str, Any] | None:
        """The RNG states before this epoch's order was drawn; unset before that."""
        return None if self._begun is None else self._begun.start

    @property
    def first(self) -> int | None:
        """A checksum of the first indices of this epoch, if known."""
        return None if self._begun is None else self._begun.first

    @property
    def rule(self) -> str | None:
        """The shuffling rule of this epoch's order, if the order was drawn."""
        return None if self._begun is None else self._begun.rule

    def prime(self) -> None:
        """Draw the order now, if not drawn yet."""
        assert self._begun is not None
        self._begun.prime()

    def why_not_drawn_again(self) -> str:
        """Return why a resumed run would draw another order, or ""; call after the first draw.

        A copy of a user's sampler is drawn from again to check. Torch's own samplers are known.
        """
        if type(innermost(self.sampler)) in _KNOWN or self._begun is None or not self._next.is_own:
            return ""
        return self._begun.why_not_drawn_again(_copy(self.sampler))

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers creates two iterators, and uses the last.
        self._begun = copy.copy(self._next)
        if self._first_seed is None:
            return self._begun.plain()
        return self._begun.seeded(
            self._first_seed + self._epoch * 104_729, is_batched=self._is_batched
        )


class _Draw:
    """One drawing of an epoch's order; `draws` is False if it was drawn before."""

    def __init__(
        self,
        owner: ResumableSampler,
        source: Any,
        done: int,
        start: dict[str, Any] | None,
        number: int = 0,
        rule: str | None = None,
        *,
        draws: bool = True,
    ) -> None:
        self.start: dict[str, Any] | None = None
        self.first: int | None = None
        self.rule = rule
        self._owner, self._source, self._draws = owner, source, draws
        self._done, self._replayed, self._number = done, start, number
        self._rest: Iterator[Any] = iter(())

    def prime(self) -> None:
        if self.start is not None:
            return
        generators = self._owner.generators
        if self._replayed is None:
            self.start = {**rng_state(), "generators": generator_states(generators)}
        else:
            self.start = self._replayed
            if self._draws:
                set_rng_state(self.start)
                set_generator_states(generators, self.start["generators"])
        self._draw()

    def _draw(self) -> None:
        source = self._source
        is_batched = type(source) is BatchSampler
        sampler = source.sampler if is_batched else source
        inner = innermost(sampler)
        self.rule = self.rule or rule_of(inner)
        order = _sequence(sampler, self.rule)
        if order is None:
            self._pass_over(iter(source))
            return
        size = source.batch_size if is_batched else 1

        def batches(indices: Any) -> Iterator[Any]:
            if is_batched:
                indices = BatchSampler(indices, size, source.drop_last)
            return iter(indices)

        self.first = checksum(list(islice(batches(order[:size]), 1)))
        # A short last batch comes after all draws of the sampler; torch's draws at its end, too.
        is_over = self._done * size > len(order)
        rest = () if is_over else draw_rest(sampler, self.rule)
        self._rest = batches(chain(order[self._done * size :], rest))

    def _pass_over(self, indices: Iterator[Any]) -> None:
        """Iterate over the skipped indices of a sampler that cannot be sliced."""
        # A sampler that is a generator draws at its first index.
        drawn = list(islice(indices, 1))
        self.first = checksum(drawn)
        if self._done:
            for _ in islice(indices, self._done - 1):
                pass
            drawn = list(islice(indices, 1))
        self._rest = chain(drawn, indices)

    @property
    def is_own(self) -> bool:
        """Whether the order is the sampler's own, and not the rest of a resharded epoch."""
        return self._draws

    def why_not_drawn_again(self, sampler: Any) -> str:
        """Compare with the draw of a copy of the sampler, without changing RNG states."""
        assert self.start is not None
        generators = self._owner.generators
        before = generator_states(generators)
        try:
            with preserve_rng_state():
                inner = getattr(sampler, "sampler", sampler)
                if iter(inner) is iter(inner):
                    return "has one iteration only, of which a resumed run would begin another"
                set_rng_state(self.start)
                set_generator_states(generators, self.start["generators"])
                indices = iter(sampler)
                if self.first != checksum(list(islice(indices, 1))):
                    return "draws from what is not in the checkpoint"
                drawn = encode(rng_state())
                next(indices, None)
                is_lazy = not torch.equal(drawn, encode(rng_state()))
        finally:
            set_generator_states(generators, before)
        if is_lazy:
            return (
                "draws its indices one by one from the random numbers that training draws from: "
                "let it draw an epoch's at once, or from a generator that it holds"
            )
        return ""

    def plain(self) -> Iterator[Any]:
        self.prime()
        yield from self._rest

    def seeded(self, first_seed: int, *, is_batched: bool) -> Iterator[Any]:
        self.prime()
        assert self.start is not None
        first_seed += zlib.crc32(bytes(self.start["torch"].tolist()))
        for number, indices in enumerate(self._rest, self._number + self._done):
            seed = (first_seed + number * 7_919) % 2**32
            yield [seed, *indices] if is_batched else (seed, indices)


_KNOWN = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Samplers that draw the same in each process, an epoch's indices at once or from a generator."""


def has_exact_length(loader: Any) -> bool:
    """Return whether a loader yields exactly `len(loader)` batches.

    This holds for lists, and for torch's DataLoader with torch's samplers. The length of an
    iterable-style dataset, or of any other object, may be an estimate.
    """
    if type(loader) in (list, tuple):
        return True
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind.__len__ is not DataLoader.__len__:
        return False
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return type(innermost(sampler)) in _KNOWN


def innermost(sampler: Any) -> Any:
    """Return the innermost sampler, without the samplers that batch or shard its indices."""
    while type(sampler) in (BatchSampler, ShardedSampler):
        sampler = sampler.sampler
    return sampler


def _sequence(sampler: Any, rule: str) -> IndexSequence | None:
    """Return an epoch's indices as a sequence; None if the sampler must be iterated."""
    if isinstance(sampler, IndexSequence):
        return sampler
    return sampler.part(rule) if type(sampler) is ShardedSampler else draw_indices(sampler, rule)


def _copy(sampler: Any) -> Any:
    """Return a copy, with copies of the contained samplers; generators are shared."""
    copied = copy.copy(sampler)
    if hasattr(sampler, "sampler"):
        copied.sampler = _copy(sampler.sampler)
    return copied


def checksum(indices: list[Any]) -> int | None:
    """Return a checksum of indices, or of batches of indices, if they are weights-only-safe."""
    return None if find_offending_value(indices) else zlib.crc32(repr(indices).encode())
