"""The loaders of one rank, made from the user's loaders, with their numbers of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, SequentialSampler

from stratagem.data.combined_loader import CombinedLoader, parts_of
from stratagem.data.sharding import (
    UNKNOWN,
    in_order,
    knows_length,
    length_of,
    set_epoch,
    with_equal_batches,
)
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.process import print_hint_once
from stratagem.trainer.hooks import is_users

if TYPE_CHECKING:
    from stratagem.trainer.context import RunContext
    from stratagem.trainer.job import Job
    from stratagem.trainer.trainer import Trainer

Limit = int | float
"""A number of batches (int), or a fraction of them (float)."""

Sharder = Callable[..., Any]
"""`Trainer.make_sharded_loader`, or a function that replaces it."""


@dataclass(frozen=True)
class EvaluationLoader:
    """A loader of this rank for validation, testing or predicting.

    Attributes:
        loader: an iterable of batches.
        batches: the number of batches to run; infinity for all batches of an unknown number.
        name: the loader's name in errors.
    """

    loader: Any
    batches: float
    name: str

    @property
    def each(self) -> list[float]:
        """The number of batches of each loader; a CombinedLoader has several loaders."""
        loader = self.loader
        several = loader.flattened if isinstance(loader, CombinedLoader) else []
        return [min(length_of(one), self.batches) for one in several] or [self.batches]

    @property
    def is_counted(self) -> bool:
        """Whether the number of batches is exact."""
        is_known = self.batches != UNKNOWN and all(map(knows_length, parts_of(self.loader)))
        return self.batches == 0 or is_known

    def no_batch_error(self) -> UserCodeError:
        """Return the error of a loader without batches."""
        return UserCodeError(f"{self.name} yielded no batch; expected at least one")


def sharder_of(trainer: Trainer) -> Sharder | None:
    """Return the function that shards data over the ranks. None: every rank reads all data."""
    return trainer.make_sharded_loader if trainer.options.use_distributed_sampler else None


def open_validation(context: RunContext) -> list[EvaluationLoader]:
    """Return this rank's validation loaders of a fit; []: there is no validation."""
    trainer, job = context.trainer, context.job
    source = None
    if trainer.options.limit_val_batches != 0 and job.model.defines("validation_step"):
        source = source_of("val_dataloader", job, job.val_loaders, needed=False)
    if source is None:
        return []
    return evaluation_loaders(in_order_if_overfit(source, trainer), trainer, "validation")


def open_evaluation(context: RunContext, what: str) -> list[EvaluationLoader]:
    """Return this rank's loaders for "validation", "test" or "predict".

    Raises:
        UserCodeError: a loader is missing or unusable.
    """
    method = f"{'val' if what == 'validation' else what}_dataloader"
    source = source_of(method, context.job, context.job.loaders, needed=True)
    return evaluation_loaders(source, context.trainer, what)


def in_order_if_overfit(source: Any, trainer: Trainer) -> Any:
    """Return loaders without shuffling, if the Trainer has `overfit_batches`."""
    if not trainer.options.overfit_batches:
        return source
    return source.map(in_order) if isinstance(source, CombinedLoader) else in_order(source)


def evaluation_loaders(source: Any, trainer: Trainer, what: str) -> list[EvaluationLoader]:
    """Return this rank's loaders for validation, testing or predicting.

    Args:
        source: a loader, or a list or dict of several.
        trainer: the Trainer, with the limit of batches and the way to shard a loader.
        what: "validation", "test" or "predict".

    Raises:
        UserCodeError: if a loader is not iterable, is empty, or lacks a length that is needed.
    """
    several = _several(source)
    limit_name = f"limit_{'val' if what == 'validation' else what}_batches"
    limit, by = getattr(trainer.options, limit_name), sharder_of(trainer)
    loaders = []
    for index, one in enumerate(several):
        name = f"the {what} data loader" + (f" {index}" if len(several) > 1 else "")
        loader = shard(one, trainer.strategy, name=name, by=by, what=what, limit=limit)
        batches = limit_batches(length_of(loader), limit, name=name, limit_name=limit_name)
        loaders.append(EvaluationLoader(loader, batches, name))
    return loaders


def shard(
    source: Any, strategy: Strategy, *, name: str, by: Sharder | None, what: str, limit: Limit
) -> Any:
    """Return this rank's form of one loader, which reads its part of the data.

    Raises:
        UserCodeError: if the loader is not iterable, is empty, or cannot be split.
    """
    if isinstance(source, CombinedLoader):
        return source.of(
            [
                shard(one, strategy, name=f"{name} {index}", by=by, what=what, limit=limit)
                for index, one in enumerate(source.flattened)
            ]
        )
    has_items = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if not has_items or isinstance(source, (str, bytes)):
        raise UserCodeError(
            f"{name} is {source!r} ({type(source).__name__}); expected a DataLoader or another "
            "iterable of batches"
        )
    dataset = getattr(source, "dataset", None)
    is_sequential = isinstance(getattr(source, "sampler", None), SequentialSampler)
    if is_sequential and not hasattr(dataset, "__len__"):
        raise UserCodeError(
            f"{name} reads a {type(dataset).__name__}, which has no __len__; expected the number "
            "of samples: define __len__, or subclass IterableDataset"
        )
    loader, training = source, what == "train"
    if by is not None:
        ranks = strategy.ranks
        index, count = ranks.data_split if training else ranks.eval_split
        can = strategy.capabilities
        may_differ = not training and (can.allows_uneven_eval or strategy.follows_evaluation)
        even = not may_differ
        if even and not training:
            repeated = _repeated_samples(source, count)
            even = repeated != 0
            if repeated and ranks.is_global_zero:
                print_hint_once(
                    f"{name}: {repeated} of its samples are read twice, so that all ranks run as "
                    "many batches, and count twice. Another batch_size may avoid this"
                )
        loader = by(source, index, count, even=even, name=name, what=what)
        loader = with_equal_batches(loader) if may_differ else loader
    # In an evaluation of few samples a rank may have no sample, while other ranks have some.
    nothing_for_this_rank = not training and length_of(source) > 0
    if length_of(loader) == 0 and limit != 0 and not nothing_for_this_rank:
        raise UserCodeError(
            f"{name} is empty: expected at least one batch"
            + _why_empty(source, strategy.ranks.world_size)
        )
    return loader


def _repeated_samples(loader: Any, count: int) -> int | None:
    """Return how many samples ranks repeat to run equally many batches; None if it is unknown.

    They repeat none if only the sizes of their last batches differ.
    """
    size, samples = getattr(loader, "batch_size", None), length_of(getattr(loader, "sampler", ()))
    if not size or samples == UNKNOWN:
        return None
    most, fewest = math.ceil(samples / count), samples // count
    rounds = math.floor if loader.drop_last else math.ceil
    are_alike = fewest > 0 and rounds(most / size) == rounds(fewest / size)
    return 0 if are_alike else int(most * count - samples)


def limit_batches(length: float, limit: Limit, *, name: str, limit_name: str) -> float:
    """Return the number of batches to run of a loader; infinity if unknown.

    Raises:
        UserCodeError: if `limit` is a fraction and the length is unknown.
        ConfigurationError: if the fraction is less than one batch.
    """
    if isinstance(limit, int) or limit == 0.0:
        return min(float(limit), length)
    if limit == 1.0:
        return length
    if length == UNKNOWN:
        raise UserCodeError(
            f"{name} has no length, so {limit_name}={limit} cannot be taken of it: pass a number "
            "of batches (int), or give it a __len__"
        )
    batches = float(int(length * limit))
    if batches == 0 and length > 0:
        raise ConfigurationError(
            f"{limit_name}={limit} of the {int(length)} batches of {name} is less than one "
            "batch: pass a larger fraction or a number of batches (int)"
        )
    return batches


def set_epoch_of(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers; a CombinedLoader has several loaders."""
    for one in parts_of(loader):
        set_epoch(one, epoch)


def _several(source: Any) -> list[Any]:
    """Return a list of loaders for one loader or several."""
    if isinstance(source, CombinedLoader) and source.mode == "sequential":
        return source.flattened
    if isinstance(source, (list, tuple)) and _has_loader(source):
        return list(source)
    if isinstance(source, Mapping):
        return list(source.values())
    return [source]


def train_source(source: Any) -> Any:
    """Return the training loader; several loaders become a CombinedLoader."""
    several = isinstance(source, Mapping) or (
        isinstance(source, (list, tuple)) and _has_loader(source)
    )
    return CombinedLoader(source, "max_size_cycle") if several else source


def source_of(method: str, job: Job, argument: Any, *, needed: bool) -> Any:
    """Return the user's loader: the argument, or else the DataModule's or the Module's.

    Args:
        method: the name of the DataModule's or Module's method that returns the loader.
        job: the request, with the DataModule and the Module.
        argument: the user's argument, or None.
        needed: whether a missing loader is an error; if False, None is returned.

    Raises:
        UserCodeError: if the loader is missing and `needed` is True.
    """
    if argument is not None:
        return argument
    for owner in (job.datamodule, job.model):
        make: Callable[[], Any] | None = getattr(owner, method, None)
        made = make() if make is not None else None
        if made is not None:
            return made
    if needed:
        for source in (job.datamodule, job.model):
            if is_users(source, method):
                raise UserCodeError(
                    f"{type(source).__name__}.{method}() returned None; expected a data loader: "
                    "return it"
                )
        raise UserCodeError(
            f"there is no data: pass a data loader or a DataModule, or define {method}() in "
            f"{type(job.model).__name__}"
        )
    return None


def _has_loader(items: Iterable[Any]) -> bool:
    """Whether these are loaders, and not batches: no batch is a DataLoader."""
    return any(isinstance(item, DataLoader) for item in items)


def _why_empty(source: Any, world_size: int) -> str:
    samples = getattr(source, "dataset", None)
    if samples is None or not hasattr(samples, "__len__"):
        return ""
    return (
        f"; its dataset has {len(samples)} samples for {world_size} rank(s), batch_size="
        f"{getattr(source, 'batch_size', None)}, drop_last={getattr(source, 'drop_last', False)}"
    )
