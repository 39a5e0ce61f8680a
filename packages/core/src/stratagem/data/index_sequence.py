"""The indices of an epoch as a sequence that can be sliced, and is computed lazily."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

PIECE = 2**15
"""The number of indices that are computed at once during iteration."""

LARGEST_OF_TORCH = 2**24
"""The most samples that torch.randperm shuffles (64 MB, half a second); a Permutation shuffles
larger numbers."""

TORCH = "torch"
FEISTEL = "feistel-1"
RULES = (TORCH, FEISTEL)
"""The names of shuffling rules, as in checkpoints. A seed must give the same order in all future
versions."""


class Permutation:
    """The numbers below `length` in a random order; any part can be computed separately.

    A Feistel network of six rounds permutes the bits of a position. Its round functions are tables
    of random numbers, each as long as the square root of the length. A result that is not below the
    length is encrypted again until the result is below (cycle walking: Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002), on average at most twice.

    Args:
        length: the number of elements, at least 1.
        generator: the generator for the tables.

    Example:
        >>> import torch
        >>> shuffled = Permutation(10**12, torch.Generator().manual_seed(0))
        >>> int(shuffled[10**11 : 10**11 + 1]) < 10**12
        True
        >>> sorted(Permutation(5, torch.Generator().manual_seed(0))[:].tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        bits = max(1, (length - 1).bit_length())
        self._length = length
        self._low_bits = bits // 2
        low, high = 2**self._low_bits, 2 ** (bits - self._low_bits)

        def table(values: int, places: int) -> Tensor:
            return torch.randint(values, (places,), generator=generator, device="cpu")

        self._rounds = [(table(high, low), table(low, high)) for _ in range(3)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> Tensor:
        """Return the numbers at a slice of positions with a positive step, int64 on the host."""
        wanted = range(*places.indices(self._length))
        end = wanted.start + len(wanted) * wanted.step
        numbers = self._encrypt(torch.arange(wanted.start, end, wanted.step, device="cpu"))
        outside = (numbers >= self._length).nonzero().squeeze(1)
        while len(outside):
            again = self._encrypt(numbers[outside])
            numbers[outside] = again
            outside = outside[again >= self._length]
        return numbers

    def _encrypt(self, numbers: Tensor) -> Tensor:
        high, low = numbers >> self._low_bits, numbers & (2**self._low_bits - 1)
        for of_low, of_high in self._rounds:
            high = of_low.index_select(0, low).bitwise_xor_(high)
            low = of_high.index_select(0, high).bitwise_xor_(low)
        return (high << self._low_bits).bitwise_or_(low)


class IndexSequence(Sequence[Any]):
    """Indices in the order of an epoch. A slice is free; iteration computes indices in pieces.

    Args:
        items: a sequence with a length and slices: a range, a 1-D tensor, a list, a Permutation, or
            another IndexSequence.
        places: the positions in `items`, modulo its length; None for all.

    Example:
        >>> order = IndexSequence([5, 3, 8, 1, 4])
        >>> [list(order.shard(rank, 2, even=True)) for rank in range(2)]
        [[5, 8, 4], [3, 1, 5]]
        >>> list(order[2:].shard(1, 2, even=False))
        [1]
    """

    def __init__(self, items: Any, places: range | None = None) -> None:
        self._items = items
        self._places = range(len(items)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> IndexSequence: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return IndexSequence(self._items, self._places[at])
        return self._take(range(self._places[at], self._places[at] + 1))[0]

    def __iter__(self) -> Iterator[Any]:
        places = self._places
        if isinstance(self._items, range) and places.stop <= len(self._items):
            return iter(self._items[places.start : places.stop : places.step])
        pieces = (places[first : first + PIECE] for first in range(0, len(self), PIECE))
        return chain.from_iterable(map(self._take, pieces))

    def tolist(self) -> list[Any]:
        """Return all indices as a list."""
        return self._take(self._places)

    def shard(self, index: int, count: int, *, even: bool) -> IndexSequence:
        """Return every `count`-th index from the `index`-th on.

        Args:
            index, count: the number of the part, and the number of parts.
            even: whether to repeat the first indices until every part has the same length.
        """
        end = -(-len(self) // count) * count if even else len(self)
        return IndexSequence(self, range(index, end, count))

    def _take(self, places: range) -> list[Any]:
        length = len(self._items)
        inside = places[: len(range(places.start, length, places.step))]
        found = self._items[inside.start : inside.stop : inside.step]
        taken = list(found) if isinstance(found, (range, list)) else found.tolist()
        for place in places[len(inside) :]:
            taken += self._take(range(place % length, place % length + 1))
        return taken


def draw_indices(sampler: Any, rule: str | None = None) -> IndexSequence | None:
    """Draw an epoch's order as torch's samplers do, without making a list.

    Indices are equal to torch's, and RNGs advance as under torch, unless the rule is FEISTEL.

    Args:
        sampler: the sampler of a loader.
        rule: the shuffling rule, an element of RULES; None selects `rule_of(sampler)`.

    Returns:
        The order, or None if the sampler must be iterated: a user's sampler, or a torch sampler
        that draws with replacement or by weights.
    """
    rule = rule or rule_of(sampler)
    if type(sampler) is SequentialSampler:
        return IndexSequence(range(len(sampler.data_source)))
    if type(sampler) is RandomSampler:
        samples = len(sampler.data_source)
        if sampler.replacement or sampler.num_samples > samples:
            return None
        generator = sampler.generator
        if generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator().manual_seed(seed)
        return _shuffle(samples, generator, rule)[: sampler.num_samples]
    if type(sampler) is DistributedSampler:
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order = IndexSequence(range(samples))
        if sampler.shuffle:
            order = _shuffle(samples, generator, rule)
        # Shorter than the order with drop_last, longer otherwise.
        order = order[: sampler.total_size]
        return order.shard(sampler.rank, sampler.num_replicas, even=True)
    return None


def draw_all(sampler: Any, rule: str | None = None) -> IndexSequence:
    """Draw an epoch's order as `draw_indices` does, or by iterating over the sampler."""
    order = draw_indices(sampler, rule)
    if order is None:
        # For torch's samplers use 8 bytes an index; a list needs 44.
        is_known = type(sampler) in (RandomSampler, WeightedRandomSampler)
        order = IndexSequence(array("q", sampler) if is_known else list(sampler))
    return order


def draw_rest(sampler: Any, rule: str) -> Iterator[Any]:
    """Advance the RNG as torch's RandomSampler does after the last index, without yielding.

    This changes a generator that the user passed to the sampler, and so the next epoch.
    """
    if type(sampler) is RandomSampler and sampler.generator is not None and rule == TORCH:
        samples = len(sampler.data_source)
        if sampler.num_samples == samples:
            torch.randperm(samples, generator=sampler.generator, device="cpu")
    yield from ()


def rule_of(sampler: Any) -> str:
    """Return the shuffling rule for a sampler, an element of RULES, by its number of samples."""
    samples: Any = ()
    if type(sampler) is RandomSampler:
        samples = sampler.data_source
    elif type(sampler) is DistributedSampler:
        samples = sampler.dataset
    return TORCH if len(samples) <= LARGEST_OF_TORCH else FEISTEL


def _shuffle(samples: int, generator: torch.Generator, rule: str) -> IndexSequence:
    if rule == FEISTEL:
        return IndexSequence(Permutation(samples, generator))
    # Half the memory and the same numbers, since these do not depend on the dtype.
    dtype = torch.int32 if samples < 2**31 else torch.int64
    return IndexSequence(torch.randperm(samples, generator=generator, dtype=dtype, device="cpu"))
