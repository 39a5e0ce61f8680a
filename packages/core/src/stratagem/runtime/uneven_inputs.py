"""UnevenInputs: handles ranks with different numbers of batches, or reports them in an error."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from stratagem.errors import UserCodeError
from stratagem.interfaces.ranks import Ranks
from stratagem.launch.process import print_hint


class UnevenInputs:
    """Checks before each optimizer step that every rank has a batch.

    Each step does one all-reduce of two numbers; `benchmarks/ddp_throughput.py` measures its cost.
    If the process group has a backend for the CPU, such as "cpu:gloo,cuda:nccl", the all-reduce
    uses it, so that no step waits for a device.

    Args:
        name: the name of the loader in errors.
        ranks: the ranks that are compared.
        strategy: the name of the strategy's class, for errors.
        joins: a rank without batches repeats its last batch with weight 0, and the weights of the
            other ranks are raised; False: raise an error.
    """

    def __init__(self, name: str, ranks: Ranks, *, strategy: str, joins: bool) -> None:
        self._name = name
        self._ranks = ranks
        self._strategy = strategy
        self._joins = joins
        self._last: list[Any] = []
        self._is_first = len(ranks.data_groups) > 1

    def remember(self, batches: Sequence[Any]) -> None:
        """Keep the last batch, which may be repeated later."""
        if self._joins and batches:
            self._last = [batches[-1]]

    def next_step(
        self, micro_batches: list[Any], done: int
    ) -> tuple[list[Any], list[float] | None]:
        """Return the micro-batches of the next step, and their weights.

        The weights are None if every weight is 1.

        Args:
            micro_batches: this rank's micro-batches.
            done: number of earlier batches in this epoch, on every rank.

        Raises:
            UserCodeError: some ranks have fewer batches; names the ranks, and after how many
                batches they ended.
        """
        self.remember(micro_batches)
        own = len(micro_batches)
        numbers = [own, -own]
        if self._is_first:
            # The text of a tensor has its first and last numbers.
            first = zlib.crc32(repr(micro_batches).encode(errors="replace")) if own else 0
            numbers += [first, -first]
        most, fewest, *firsts = self._ranks.all_reduce_ints(numbers, "max")
        if firsts and firsts[0] == -firsts[1] != 0 and self._ranks.is_global_zero:
            print_hint(
                f"{self._name} yielded the same first batch on all {self._ranks.world_size} ranks. "
                "Data without an index are not divided over ranks: let the dataset yield the part "
                "(index, count) that ranks.data_split of the Trainer or Lite names"
            )
        self._is_first = False
        if most == -fewest:
            return micro_batches, None
        if not self._joins:
            counts = self._ranks.all_gather(torch.tensor(own)).tolist()
            raise UserCodeError(self._differ(counts, done))
        if not self._last:
            raise UserCodeError(
                f"{self._name} yielded no batch on rank {self._ranks.global_rank}; expected at "
                "least one on each, since the last one is repeated while other ranks have more"
            )
        missing = most - own
        having = self._ranks.all_reduce_ints([own > position for position in range(most)], "sum")
        # Gradients are averaged over all ranks; this makes it an average over the ranks with a
        # batch.
        weights = [self._ranks.world_size / count for count in having[:own]]
        return micro_batches + self._last * missing, weights + [0.0] * missing

    def _differ(self, counts: list[int], done: int) -> str:
        most = max(counts)
        ended = ", ".join(
            f"rank {rank} ended after {done + count} batch(es)"
            for rank, count in enumerate(counts)
            if count < most
        )
        return (
            f"{self._name} has different numbers of batches on the ranks: {ended}, and others had "
            "more, while every optimizer step needs one from each: "
            + remedy_for(done + min(counts), self._strategy)
        )


def remedy_for(fewest: int, strategy: str) -> str:
    """Return a remedy for uneven inputs; `fewest` is the smallest number of batches on a rank."""
    limit = f"pass limit_train_batches={fewest}, or " if fewest else ""
    return (
        f"{limit}let every rank's data have as many batches, or train on with those that have some "
        f"by {strategy}(join_uneven_inputs=True)"
    )
