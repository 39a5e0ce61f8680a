"""The order of all ranks together, and what is left of an epoch resharded to others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from stratagem.data.index_sequence import IndexSequence, draw_all
from stratagem.data.sharding import ShardedSampler
from stratagem.rng import (
    generator_states,
    preserve_rng_state,
    set_generator_states,
    set_rng_state,
)


@dataclass(frozen=True)
class Order:
    """How the order of an epoch's samples is drawn, of which ranks read every n-th one.

    Attributes:
        kind: "sharded": by the loader's sampler under a seed that ranks share; "distributed": by
            torch's DistributedSampler; "whole": by the loader's sampler alone, for one reader.
        sampler: the loader's own.
        seed: with the epoch, what the order follows from; None with "whole".
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
        """Return an epoch's indices of all ranks; global RNG states stay as they are.

        Args:
            seed: the one that the order was drawn with at first; None: it was drawn by one reader.
            epoch: which.
            start: the RNG states when it was drawn.
            generators: that the sampler may draw from.
            rule: what shuffles; None: see `index_sequence.rule_of`.
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
    """Return how a loader's order is drawn, or why that is not known.

    Args:
        loader: of a dataset that is read by index.
        shards: how many parts the data are to be divided into.
    """
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
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
    """The rest of an epoch, resharded anew to ranks that are not as many as began it.

    Attributes:
        seed: of the epoch's order; None: it was drawn by one reader.
        samples: how many of that order were read before.
        batches: how many batches of the new ranks' size that is, on each, rounded down.
    """

    seed: int | None
    samples: int
    batches: int

    def part(self, order: IndexSequence, loader: DataLoader[Any], index: int, count: int) -> Any:
        """Return what one rank's loader takes its indices from, in this epoch.

        Args:
            order: the epoch's, of all ranks.
            loader: of the rank.
            index, count: which part, of how many.
        """
        rest = order[self.samples :]
        if getattr(loader.sampler, "drop_last", False):  # DistributedSampler's
            rest = rest[: len(rest) // count * count]
        mine = rest.shard(index, count, even=True)
        batches: Any = loader.batch_sampler
        return (
            mine if batches is None else BatchSampler(mine, batches.batch_size, batches.drop_last)
        )
