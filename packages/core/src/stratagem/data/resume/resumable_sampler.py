"""The order in which a rank reads an epoch's samples: drawn again, or skipped."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from stratagem.data.index_sequence import IndexSequence, draw_indices, draw_rest, rule_of
from stratagem.data.sharding import TORCH_SAMPLERS, ShardedSampler, is_iterated_by_torch
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

    It stores the RNG states before the sampler draws (`draw.start`), so that the sampler can draw
    the same order again.

    Args:
        sampler: the loader's batch sampler, or its sampler without automatic batching.
        generators: the generators that the sampler may draw from, besides the global RNGs.
        is_batched: whether the sampler yields lists of indices.
        first_seed: the seed for workers. Its sum with the batch's number is put before the indices
            of each batch. None omits this number.

    Attributes:
        draw: the latest iteration.
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
        self.is_batched = is_batched
        self._first_seed = first_seed
        self.draw = self._next = Draw(self, sampler, first_seed)

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
        skip: int = 0,
        start: dict[str, Any] | None = None,
        rule: str | None = None,
        indices: Any = None,
        first_number: int = 0,
    ) -> None:
        """Prepare for the next iteration.

        Args:
            epoch: the number of the epoch, which changes the workers' seeds.
            skip: the number of batches to skip.
            start: the RNG states to draw from; None for the current states.
            rule: the shuffling rule; None selects `index_sequence.rule_of`.
            indices: the rest of a resharded epoch, which was drawn before; None draws from the
                sampler.
            first_number: the number of the first batch before skipping, for workers' seeds.
        """
        source = self.sampler if indices is None else indices
        seed = None if self._first_seed is None else self._first_seed + epoch * 104_729
        self.draw = self._next = Draw(self, source, seed, skip, start, rule, first_number)

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers creates two iterators, and uses the last.
        self.draw = copy.copy(self._next)
        return iter(self.draw)


@dataclass
class Draw:
    """One iteration over an epoch's order, drawn from the sampler or given by a reshard.

    Attributes:
        owner: the sampler that is iterated over.
        source: its own sampler, or the source of the indices of a reshard.
        first_seed: the seed for workers, without the part that `start` determines; None: no seeds.
        skip: the number of batches to skip.
        replayed: the RNG states to draw from; None for the current states.
        rule: the shuffling rule of the order; None before the order is drawn.
        first_number: the number of the first batch before skipping, for workers' seeds.
        start: the RNG states before the order was drawn; None before that.
        first: a checksum of the first indices, if known.
    """

    owner: ResumableSampler
    source: Any
    first_seed: int | None
    skip: int = 0
    replayed: dict[str, Any] | None = None
    rule: str | None = None
    first_number: int = 0
    start: dict[str, Any] | None = field(default=None, init=False)
    first: int | None = field(default=None, init=False)
    _rest: Iterator[Any] = field(default=iter(()), init=False)

    def prime(self) -> None:
        """Draw the order now, if not drawn yet."""
        if self.start is not None:
            return
        generators = self.owner.generators
        if self.replayed is None:
            self.start = {**rng_state(), "generators": generator_states(generators)}
        else:
            self.start = self.replayed
            if self.is_own:
                set_rng_state(self.start)
                set_generator_states(generators, self.start["generators"])
        self._draw()

    def _draw(self) -> None:
        source = self.source
        is_batched = type(source) is BatchSampler
        sampler = source.sampler if is_batched else source
        inner = innermost(sampler)
        self.rule = self.rule or rule_of(inner)
        order = _sequence(sampler, self.rule)
        if order is None:
            self._skip_read(iter(source))
            return
        size = source.batch_size if is_batched else 1

        def batches(indices: Any) -> Iterator[Any]:
            if is_batched:
                indices = BatchSampler(indices, size, source.drop_last)
            return iter(indices)

        self.first = checksum(list(islice(batches(order[:size]), 1)))
        # A short last batch comes after all draws of the sampler; torch's draws at its end, too.
        is_over = self.skip * size > len(order)
        rest = () if is_over else draw_rest(sampler, self.rule)
        self._rest = batches(chain(order[self.skip * size :], rest))

    def _skip_read(self, indices: Iterator[Any]) -> None:
        """Iterate over the skipped indices of a sampler that cannot be sliced."""
        # A sampler that is a generator draws at its first index.
        drawn = list(islice(indices, 1))
        self.first = checksum(drawn)
        if self.skip:
            for _ in islice(indices, self.skip - 1):
                pass
            drawn = list(islice(indices, 1))
        self._rest = chain(drawn, indices)

    @property
    def is_own(self) -> bool:
        """Whether the order is the sampler's own, and not the rest of a resharded epoch."""
        return self.source is self.owner.sampler

    def why_not_drawn_again(self) -> str:
        """Return why a resumed run would draw another order, or ""; call after the first draw.

        A copy of a user's sampler is drawn from again to check, without changing RNG states.
        Torch's own samplers are known.
        """
        if type(innermost(self.owner.sampler)) in TORCH_SAMPLERS or not self.is_own:
            return ""
        sampler = _copy(self.owner.sampler)
        assert self.start is not None
        generators = self.owner.generators
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

    def __iter__(self) -> Iterator[Any]:
        self.prime()
        if self.first_seed is None:
            yield from self._rest
            return
        assert self.start is not None
        first_seed = self.first_seed + zlib.crc32(bytes(self.start["torch"].tolist()))
        for number, indices in enumerate(self._rest, self.first_number + self.skip):
            seed = (first_seed + number * 7_919) % 2**32
            yield [seed, *indices] if self.owner.is_batched else (seed, indices)


def has_exact_length(loader: Any) -> bool:
    """Return whether a loader yields exactly `len(loader)` batches.

    This holds for lists, and for torch's DataLoader with torch's samplers. The length of an
    iterable-style dataset, or of any other object, may be an estimate.
    """
    if type(loader) in (list, tuple):
        return True
    if not is_iterated_by_torch(loader):
        return False
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return type(innermost(sampler)) in TORCH_SAMPLERS


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
