"""From what the user hands over to the loaders of one rank, with their numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.sharding import UNKNOWN, length_of, shard_loader
from stratagem.distributed.uneven_inputs import UnevenInputs, remedy_for
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.strategy import Strategy

Limit = int | float


@dataclass(frozen=True)
class LimitedLoader:
    """A loader of this rank, and how many of its batches to take.

    Attributes:
        loader: iterable of batches.
        batches: how many to take; infinity: all, and their number is not known.
        name: stands for it in errors.
    """

    loader: Any
    batches: float
    name: str


def attach(
    source: Any,
    *,
    name: str,
    limit: Limit,
    strategy: Strategy,
    use_distributed_sampler: bool,
    training: bool,
    limit_name: str,
) -> LimitedLoader:
    """Return one loader as this rank reads it.

    Raises:
        UserCodeError: it is not iterable, is empty, or has no length where one is needed.
    """
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise UserCodeError(
            f"{name} is a {type(source).__name__}; expected a DataLoader or another iterable of "
            "batches"
        )
    loader = source
    if use_distributed_sampler:
        index, count = strategy.ranks.data_shard
        # Ranks must run as many steps in training, and in evaluation where forward communicates.
        even = training or not strategy.capabilities.uneven_evaluation
        loader = shard_loader(source, index, count, even=even, name=name)
    length = length_of(loader)
    # A rank may have none of an evaluation's few samples, where others have some.
    nothing_for_this_rank = not training and length_of(source) > 0
    if length == 0 and limit != 0 and not nothing_for_this_rank:
        raise UserCodeError(
            f"{name} is empty: expected at least one batch"
            + _why_empty(source, loader, strategy.ranks.world_size)
        )
    if isinstance(limit, int) or limit == 0.0:
        batches = min(float(limit), length)
    elif limit == 1.0:
        batches = length
    elif length == UNKNOWN:
        raise UserCodeError(
            f"{name} has no length, so {limit_name}={limit} cannot be taken of it: pass a number "
            "of batches (int), or give it a __len__"
        )
    else:
        batches = float(int(length * limit))
        if batches == 0 and length > 0:
            raise ConfigurationError(
                f"{limit_name}={limit} of the {int(length)} batches of {name} is less than one "
                "batch: pass a larger fraction or a number of batches (int)"
            )
    return LimitedLoader(loader, batches, name)


def evaluation_loaders(source: Any) -> list[Any]:
    """Return a list of loaders for one loader or several."""
    if isinstance(source, (list, tuple)) and source and _all_loaders(source):
        return list(source)
    if isinstance(source, Mapping):
        return list(source.values())
    return [source]


def training_loader(source: Any) -> Any:
    """Return the one loader for training.

    Raises:
        UserCodeError: several were given.
    """
    several = (isinstance(source, (list, tuple)) and _all_loaders(source)) or (
        isinstance(source, Mapping) and _all_loaders(list(source.values()))
    )
    if several:
        raise UserCodeError(
            f"the training data loader is a {type(source).__name__} of {len(source)} loaders; "
            "expected one: combine the data in one Dataset, or in one iterable of batches"
        )
    return source


def source_of(stage_loader: str, given: Any, datamodule: Any, module: Any, *, needed: bool) -> Any:
    """Return the user's loader for one purpose: the argument, the DataModule's or the Module's.

    Raises:
        UserCodeError: there is none and one is needed.
    """
    if given is not None:
        return given
    for owner in (datamodule, module):
        make: Callable[[], Any] | None = getattr(owner, stage_loader, None)
        made = make() if make is not None else None
        if made is not None:
            return made
    if needed:
        raise UserCodeError(
            f"there is no data: pass a data loader or a DataModule, or define {stage_loader}() in "
            f"{type(module).__name__}"
        )
    return None


def _all_loaders(items: Any) -> bool:
    return bool(items) and all(isinstance(item, DataLoader) for item in items)


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches; None if it does not say."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _why_empty(source: Any, loader: Any, world_size: int) -> str:
    samples = getattr(source, "dataset", None)
    if samples is None or not hasattr(samples, "__len__"):
        return ""
    drop_last = getattr(source, "drop_last", False)
    return (
        f"; its dataset has {len(samples)} samples for {world_size} rank(s), batch_size="
        f"{getattr(source, 'batch_size', None)}, drop_last={drop_last}"
    )


def agree(loader: LimitedLoader, strategy: Strategy) -> tuple[LimitedLoader, UnevenInputs | None]:
    """Compare the ranks' training loaders, once before training; called on every rank.

    Returns:
        The loader, with a number of batches that all ranks share; and what they agree with before
        each optimizer step, or None where that is not needed: all lengths are known, alike, and of
        a kind that can be relied on. An IterableDataset's cannot; it often is that of all ranks.

    Raises:
        UserCodeError: lengths are known and differ, and the strategy does not join ranks.
    """
    if strategy.ranks.world_size == 1:
        return loader, None
    dataset = getattr(loader.loader, "dataset", None)
    known = length_of(loader.loader) != UNKNOWN
    relied_on = known and not isinstance(dataset, IterableDataset)
    ranks = strategy.ranks.gather_plain((loader.batches, known, relied_on))
    batches = [rank[0] for rank in ranks]
    alike = min(batches) == max(batches)
    joins, kind = strategy.join_uneven_inputs, type(strategy).__name__
    if not alike and not joins and all(rank[1] for rank in ranks):
        listed = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(batches))
        raise UserCodeError(
            f"{loader.name} has different numbers of batches on the ranks ({listed}), and every "
            f"optimizer step needs one from each: {remedy_for(int(min(batches)), kind)}"
        )
    if alike and all(rank[2] for rank in ranks):
        return loader, None
    uneven_inputs = UnevenInputs(loader.name, strategy.ranks, strategy=kind, joins=joins)
    return replace(loader, batches=max(batches)), uneven_inputs
