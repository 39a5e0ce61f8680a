"""Ranks with different numbers of training batches: refused, or joined; never a hang."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import IterableDataset

from stratagem.data.sharding import UNKNOWN, length_of
from stratagem.distributed.uneven_inputs import Agreement, remedy_for
from stratagem.errors import UserCodeError
from stratagem.interfaces.strategy import Strategy
from stratagem.trainer.loaders import LimitedLoader


def agree(loader: LimitedLoader, strategy: Strategy) -> tuple[LimitedLoader, Agreement | None]:
    """Compare the ranks' training loaders, once before training; called on every rank.

    Returns:
        The loader, with a number of batches that all ranks share; and what they agree with before
        each optimizer step, or None where that is not needed: all lengths are known, alike, and of
        a kind that can be relied on. An IterableDataset's cannot; it often is that of all ranks.

    Raises:
        UserCodeError: lengths are known and differ, and the strategy does not join ranks.
    """
    if strategy.world_size == 1:
        return loader, None
    dataset = getattr(loader.loader, "dataset", None)
    known = length_of(loader.loader) != UNKNOWN
    relied_on = known and not isinstance(dataset, IterableDataset)
    ranks = strategy.gather_plain((loader.batches, known, relied_on))
    batches = [rank[0] for rank in ranks]
    alike = min(batches) == max(batches)
    joins = strategy.join_uneven_inputs
    if not alike and not joins and all(rank[1] for rank in ranks):
        listed = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(batches))
        raise UserCodeError(
            f"{loader.name} has different numbers of batches on the ranks ({listed}), and every "
            f"optimizer step needs one from each: {remedy_for(int(min(batches)), strategy)}"
        )
    if alike and all(rank[2] for rank in ranks):
        return loader, None
    return replace(loader, batches=max(batches)), Agreement(loader.name, strategy, joins=joins)
