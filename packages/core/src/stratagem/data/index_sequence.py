"""The indices of an epoch as a sequence that can be sliced, and is computed where it is read."""

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
"""How many indices are computed at once while a sequence is iterated over."""

LARGEST_OF_TORCH = 2**24
"""So many samples are shuffled by torch.randperm (64 MB, half a second); more by a Permutation."""

TORCH = "torch"
FEISTEL = "feistel-1"
RULES = (TORCH, FEISTEL)
"""What may shuffle an epoch; in checkpoints. The same seed must give the same order for ever."""


class Permutation:
    """The numbers below `length` in a random order, of which any part is computed by itself.

    A Feistel network of six rounds over the bits of a place. Its round functions are tables of
    random numbers, of the square root of the length each. A number that is not below the length
    is encrypted again until one is (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002), twice on average at most.

    Args:
        length: at least 1.
        generator: that the tables are drawn from.

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
        """Return the numbers at a slice of places, of a positive step: int64, on the host."""
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
    """Indices in the order of an epoch. A slice takes no time; iterating computes piece by piece.

    Args:
        items: what it is a part of, with a length and slices: a range, a tensor of one dimension, a
            list, a Permutation, or another IndexSequence.
        places: its places in `items`; what goes beyond the end begins anew there. None: all.

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
        """Return all of them as a list."""
        return self._take(self._places)

    def shard(self, index: int, count: int, *, even: bool) -> IndexSequence:
        """Return every `count`-th from the `index`-th on; ranks take them in turn, like cards.

        Args:
            index, count: which part, of how many.
            even: repeat the first ones until every rank has as many.
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
    """Draw an epoch's order as a sampler of torch's would; no list of it is made.

    It is torch's own, index for index, and RNGs advance as under torch, unless the rule is FEISTEL.

    Args:
        sampler: of a loader.
        rule: what shuffles, one of RULES; None: see `rule_of`.

    Returns:
        The order, or None of a sampler that has to be asked for one index after another: the
        user's, and those of torch that draw with replacement or by weights.
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
    """Draw an epoch's order as `draw_indices` does, or by asking the sampler for each index."""
    order = draw_indices(sampler, rule)
    if order is None:
        # Of torch's samplers 8 bytes an index, where a list has 44.
        is_known = type(sampler) in (RandomSampler, WeightedRandomSampler)
        order = IndexSequence(array("q", sampler) if is_known else list(sampler))
    return order


def draw_rest(sampler: Any, rule: str) -> Iterator[Any]:
    """Draw what torch's RandomSampler draws after the last index; yields nothing.

    It is seen in the generator that a user has given to the sampler, and so in the next epoch.
    """
    if type(sampler) is RandomSampler and sampler.generator is not None and rule == TORCH:
        samples = len(sampler.data_source)
        if sampler.num_samples == samples:
            torch.randperm(samples, generator=sampler.generator, device="cpu")
    yield from ()


def rule_of(sampler: Any) -> str:
    """Return what shuffles the samples of a sampler, one of RULES; it goes by their number."""
    samples: Any = ()
    if type(sampler) is RandomSampler:
        samples = sampler.data_source
    elif type(sampler) is DistributedSampler:
        samples = sampler.dataset
    return TORCH if len(samples) <= LARGEST_OF_TORCH else FEISTEL


def _shuffle(samples: int, generator: torch.Generator, rule: str) -> IndexSequence:
    if rule == FEISTEL:
        return IndexSequence(Permutation(samples, generator))
    # Half the memory, and the same numbers: they are drawn alike for each dtype.
    dtype = torch.int32 if samples < 2**31 else torch.int64
    return IndexSequence(torch.randperm(samples, generator=generator, dtype=dtype, device="cpu"))
