"""Where Lightning's numbers differ from ours: data, seeds, short windows, frequencies."""

from __future__ import annotations

import os
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from stratagem import seed_everything
from stratagem.data import (
    ShardedSampler,
    divides_data,
    sampler_of,
    with_sampler,
)
from stratagem.rng import SEED_VARIABLE, SeededOnce, chosen_seed, seeds_workers
from stratagem.strategies import ParallelStrategy, Strategy
from stratagem.trainer import FitState
from stratagem_lightning.api.utilities.samplers import DistributedSamplerWrapper
from stratagem_lightning.api.utilities.seed import pl_worker_init_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem.trainer import Run


class FinishedFitState(FitState):
    """The state of a fit that has ended, during an evaluation of its own.

    With Lightning, values of an evaluation after a fit have the number of optimizer steps as their
    step, and values of a validation within a fit the index of the last one.
    """

    @property
    def logged_step(self) -> int:
        """The number of optimizer steps."""
        return self.global_step


def shard_for_one_rank(loader: Any, strategy: Strategy) -> Any:
    """Return a loader of the only rank, which reads it through a sampler of ranks as several do.

    Lightning has such a sampler under strategies of several processes, whatever their number.
    """
    if (
        not isinstance(strategy, ParallelStrategy)
        or not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or divides_data(loader)
        or type(loader.batch_sampler) not in (BatchSampler, type(None))
    ):
        return loader
    own = sampler_of(loader)
    return with_sampler(loader, ShardedSampler(own, 0, 1, even=True, seed=chosen_seed()))


def in_order_of_distributed_sampler(loader: Any, what: str, *, shuffles: bool) -> Any:
    """Make a loader that was sharded here read its samples in the order of Lightning.

    In Lightning, a DistributedSampler replaces the sampler. Training data is always shuffled; data
    of an evaluation is shuffled if the loader shuffles. Ranks read equally many samples, except for
    called: a run that resumes within an epoch then needs as many ranks as before.

    Args:
        loader: the loader of one rank; a loader that was not sharded here is unchanged.
        what: "train", "validation", "test" or "predict"; "" under Fabric, for any kind of loader.
        shuffles: False: no data is shuffled.
    """
    batches = getattr(loader, "batch_sampler", None)
    part = batches.sampler if type(batches) is BatchSampler else getattr(loader, "sampler", None)
    if not isinstance(part, ShardedSampler):
        return loader
    own = part.sampler
    options: dict[str, Any] = {
        "num_replicas": 1,  # the shards are made of this order
        "rank": 0,
        "seed": part.seed,
        "shuffle": shuffles and (what == "train" or isinstance(own, RandomSampler)),
    }
    if isinstance(own, (RandomSampler, SequentialSampler)):
        part.sampler = DistributedSampler(loader.dataset, **options)
    elif SEED_VARIABLE in os.environ and (part.even or what != "predict"):
        # Drawn from the global RNGs: the ranks share their states after `seed_everything`.
        options |= {"num_replicas": part.count, "rank": part.index}
        return with_sampler(loader, DistributedSamplerWrapper(own, **options))
    else:
        part.sampler = DistributedSamplerWrapper(own, **options)
    part.even = part.even or what != "predict"
    return loader


def ask_for_iterator(loader: Any, what: str, run: Run) -> Callable[[], None] | None:
    """Create one more iterator of a loader that is not a DataLoader.

    Lightning does so to check the loader, when it creates its loaders: after the sanity check for
    the training loader; before the sanity check or the first validation for validation loaders.
    Each iterator may draw random numbers.

    Args:
        loader: the loader of the user.
        what: "train", "validation", "test" or "predict".
        run: the run.

    Returns:
        A function to call after the sanity check, or None.
    """
    if isinstance(loader, DataLoader):
        return None
    begins = run.stage == "fit" and run.prepared is None
    # A resumed fit checks nothing.
    has_check = run.state.epoch == 0 and run.trainer.options.num_sanity_val_steps != 0
    ask = partial(iter, loader)
    if begins and what == "train" and has_check and run.resume_point.path is None:
        return ask
    if begins and what == "validation" and not has_check:
        run.validation.before_next.append(ask)
    else:
        ask()
    return None


def seed_workers_once(loader: Any, rank: int) -> Any:
    """Return a loader with the same random numbers in its workers as with Lightning.

    In Lightning, torch seeds a worker when it starts, and `seed_everything(workers=True)` adds the
    rank. Our own Trainer seeds workers for each batch, so that a run can resume between two
    batches.

    Args:
        loader: the loader of the user; a loader without workers, or of another class than
            DataLoader, is unchanged.
        rank: the rank of this process.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    own = loader.worker_init_fn
    if isinstance(own, SeededOnce):
        return loader
    if own is None and seeds_workers():
        own = partial(pl_worker_init_function, rank=rank)
    loader = copy(loader)
    loader.worker_init_fn = SeededOnce(own)
    return loader


def cast_each_time(strategy: Strategy) -> None:
    """Let autocast cast a weight for each of its uses, as in Lightning's Trainer.

    With torch's cache the gradients of several uses are added up in the low precision.
    """
    precision: Any = strategy.precision
    if "forward_context" not in vars(precision):
        precision.forward_context = partial(_without_cache, precision.forward_context)


def _without_cache(make: Callable[[], Any]) -> Any:
    context = make()
    if isinstance(context, torch.autocast):
        context._cache_enabled = False
    return context


def reset_seed(strategy: Strategy) -> None:
    """Seed again, where `seed_everything` was called and several processes may train.

    Lightning does so in each process when it joins the others.
    """
    if SEED_VARIABLE in os.environ and isinstance(strategy, ParallelStrategy):
        seed_everything(workers=seeds_workers())
